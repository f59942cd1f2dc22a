"""A whole system of real processes, two of each role and a Redis, whose parts can be killed and frozen, and whose
network can be cut, broken and slowed down between any two of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from slipstream.client.client import RetrySettings, complete
from slipstream.client.completion import Completion
from slipstream.errors import Unavailable
from slipstream.rpc.channel import channel
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2, worker_pb2, worker_pb2_grpc
from tests.support.fleet import emulated_text
from tests.support.loopback_addresses import HOST
from tests.support.network_relay import Network, open_files
from tests.support.redis_server import RedisServer, redis_process

ROOT = Path(__file__).resolve().parents[2]
PASS_MS, FAULT_EVERY = 15, 200
LEASE_S = 1.0
MAX_SESSIONS, CREDIT = 24, 64
"""Of each gateway; of each session, in tokens."""
ANYWHERE = "127.0.0.1:0"
BUSY_S = 180.0
STALL_S = 4.0
"""A client that heard nothing for so long asks another gateway."""


@dataclass
class Part:
    """One process at one address, whatever happens to it."""

    name: str
    role: Role
    listen: str
    """The setting that names its address."""
    address: str = ""
    door: str = ""
    """The address that others know: what they say goes through the network."""

    @property
    def running(self) -> bool:
        return self.role._process is not None and self.role._process.returncode is None

    @property
    def pid(self) -> int:
        assert self.role._process is not None
        return self.role._process.pid

    async def start(self) -> None:
        self.address = await self.role.start({self.listen: self.address or ANYWHERE})

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert await self.role.ended() == -signal.SIGKILL, "the fault did not happen"

    async def replace(self) -> float:
        """Asked to end, as an upgrade does, and started again; the seconds that it took to end."""
        began = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await self.role.ended() == 0
        ended = time.monotonic()
        await self.start()
        return ended - began

    async def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        await _state(self.pid, "T")

    async def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        await _state(self.pid, "SR")


def asking(first: int, tokens: int) -> gateway_pb2.GenerateRequest:
    """For so many tokens; `first` makes it a text of its own."""
    request = gateway_pb2.GenerateRequest(max_tokens=tokens)
    request.prompt_token_ids.token_ids.extend([first, 8, 9])
    return request


def expected(first: int, tokens: int) -> list[int]:
    """What the target alone says to that."""
    return emulated_text([first, 8, 9], tokens)


@dataclass
class Text:
    """A client's completion, and the longest time in which nothing came."""

    first: int
    tokens: int
    running: asyncio.Task[Completion] = field(init=False)
    gap_s: float = 0.0
    heard: int = 0
    refused: int = 0
    """Gateways that were away when it was to begin: the next one was asked."""

    def expected(self) -> list[int]:
        return expected(self.first, self.tokens)


@dataclass
class Cluster:
    gateways: list[Part]
    verifiers: list[Part]
    drafters: list[Part]
    redis: RedisServer
    network: Network
    traces: Path
    """The folder of them; traced is what its client asks for."""
    _texts: int = 0

    @property
    def parts(self) -> list[Part]:
        return [*self.gateways, *self.verifiers, *self.drafters]

    async def say(self, count: int, tokens: int) -> list[Text]:
        """So many texts begin, half of them at each gateway; returns when all have."""
        texts = []
        for number in range(count):
            self._texts += 1
            text = Text(self._texts % 200, tokens)
            text.running = asyncio.create_task(self._run(text, number % 2))
            texts.append(text)
        async with asyncio.timeout(180):
            while not all(text.heard for text in texts):
                await asyncio.sleep(0.01)
                for text in texts:
                    assert not text.running.done() or text.running.result()
        return texts

    async def busy(self, count: int, tokens: int, pairs: Iterable[tuple[str, str]]) -> list[Text]:
        """As `say`, in the middle of texts about which all these pairs talk: what strikes now hits them."""
        lanes = {pair: self.network.way(*pair).back for pair in pairs}
        silent: set[tuple[str, str]] = set()
        try:
            async with asyncio.timeout(BUSY_S):
                while True:
                    before = {pair: lane.passed for pair, lane in lanes.items()}
                    texts = await self.say(count, tokens)
                    while not all(text.running.done() for text in texts):
                        if not (silent := {pair for pair in lanes if lanes[pair].passed == before[pair]}):
                            return texts
                        await asyncio.sleep(0.01)
        except TimeoutError as error:
            told = [
                f"{one} ({await self._described(one)}) and {two} ({await self._described(two)})" for one, two in silent
            ]
            raise AssertionError(f"in {BUSY_S:g} s of texts these never talked: {'; '.join(told)}") from error

    async def _described(self, name: str) -> str:
        part = next((part for part in self.parts if part.name == name), None)
        if part is None or not part.running:
            return "no process of this system" if part is None else "not running"
        said = f"state {Path(f'/proc/{part.pid}/stat').read_text().rpartition(')')[2].split()[0]}"
        if part in self.gateways:
            return said
        with contextlib.suppress(grpc.aio.AioRpcError):
            load = await self._load(part)
            return f"{said}, {load.sessions} sessions, {load.kv_blocks_free} of {load.kv_blocks_total} blocks free"
        return f"{said}, and does not answer"

    async def _run(self, text: Text, at: int) -> Completion:
        request = asking(text.first, text.tokens)
        loop = asyncio.get_running_loop()
        last = loop.time()

        def hear(_: str) -> None:
            nonlocal last
            text.gap_s = max(text.gap_s, loop.time() - last) if text.heard else 0.0
            text.heard, last = text.heard + 1, loop.time()

        async with channel(self.gateways[at].door) as here, channel(self.gateways[1 - at].door) as there:
            for one, other in itertools.cycle([(here, there), (there, here)]):
                try:
                    return await complete(one, request, hear, [other], RetrySettings(stall_s=STALL_S))
                except Unavailable:  # it never began: another try is another text
                    assert not text.heard
                    text.refused += 1
                    await asyncio.sleep(0.2)
        raise AssertionError

    async def deciding(self) -> Part:
        """A verifier that has sessions."""
        while True:
            for part in self.verifiers:
                if (await self._load(part)).sessions:
                    return part

    async def at_rest(self) -> float:
        """Returns once nothing is left of any session: no KV, no candidates, no lease. The seconds that it took."""
        began = time.monotonic()
        async with asyncio.timeout(180):
            for part in [*self.verifiers, *self.drafters]:
                while (load := await self._load(part)).sessions or load.kv_blocks_free != load.kv_blocks_total:
                    await asyncio.sleep(0.05)
            while self.redis.leases():
                await asyncio.sleep(0.05)
        return time.monotonic() - began

    def open_files(self) -> dict[str, int]:
        """How many each process has: connections are files too."""
        return {part.name: len(open_files(part.pid)) for part in self.parts}

    def resident_mib(self) -> dict[str, float]:
        """Memory of each process."""
        return {part.name: _resident_mib(part.pid) for part in self.parts}

    async def _load(self, part: Part) -> worker_pb2.WatchResponse:
        async with channel(part.address) as line:
            call = worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest(), timeout=10)
            load: worker_pb2.WatchResponse = await call.read()
            call.cancel()
            return load


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


async def _state(pid: int, wanted: str) -> None:
    """A fault that did not happen proves nothing: waits for the kernel's word."""
    async with asyncio.timeout(60):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in wanted:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(redis_process(folder))
        traces = folder / "traces"
        traced = {
            "SLIPSTREAM_TRACE_FOLDER": str(traces),
            "SLIPSTREAM_TRACE_ROUNDS": "all",
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }

        def part(name: str, module: str, prefix: str, **settings: str) -> Part:
            own = {f"{prefix}_{key}": value for key, value in settings.items()}
            role = Role(module, own | traced | {"OMP_NUM_THREADS": "1"})
            stack.push_async_callback(role.end)
            return Part(name, role, f"{prefix}_LISTEN")

        # Whatever else happens, a pass of a verifier fails every now and then, which nobody may notice.
        target, draft = (
            f"emulated:base_ms={PASS_MS}&fault_every={FAULT_EVERY}",
            "emulated:base_ms=2&acceptance=0.8&fanout=0.5",
        )
        worker = {"KV_TOKENS": "100000", "GRACE_S": "1"}
        # A drafter whose candidates do not pay is told to pause: verifier and drafter would have nothing to say.
        speculating = {"ALWAYS_SPECULATE": "true", "MAX_WAIT_S": "0.05"}
        decider = worker | speculating | {"MODEL": target, "MEASURE_S": "0.1"}
        verifiers = [part(f"verifier {n}", "verifier_svc", "VERIFIER", **decider) for n in "ab"]
        drafters = [part(f"drafter {n}", "drafter_svc", "DRAFTER", MODEL=draft, **worker) for n in "ab"]
        parts: list[Part] = [*verifiers, *drafters]
        network = Network(lambda: {"client": os.getpid()} | {each.name: each.pid for each in parts if each.running})
        stack.push_async_callback(network.close)
        await asyncio.gather(*(each.start() for each in parts))
        for each in parts:
            each.door = await network.door(each.name, each.address)
        settings = {
            "VERIFIERS": ",".join(each.door for each in verifiers),
            "DRAFTERS": ",".join(f"{each.name[-1]}={each.door}" for each in drafters),
            "TOKENIZER": str(ROOT / "models" / "target"),
            "STORE": f"redis://{await network.door('store', f'{HOST}:{redis.port}')}/0",
            "LEASE_S": str(LEASE_S),
            "STALL_S": "1",
            "GRACE_S": "1",
            "MAX_SESSIONS": str(MAX_SESSIONS),
            "CREDIT_TOKENS": str(CREDIT),
            "BREAKER_WINDOW_S": "1",
            "BREAKER_COOL_DOWN_S": "0.2",
            "BREAKER_LONGEST_COOL_DOWN_S": "0.5",
        }
        gateways = [part(f"gateway {n}", "gateway", "GATEWAY", **settings) for n in "ab"]
        parts += gateways
        await asyncio.gather(*(each.start() for each in gateways))
        for each in gateways:
            each.door = await network.door(each.name, each.address)
        yield Cluster(gateways, verifiers, drafters, redis, network, traces)
