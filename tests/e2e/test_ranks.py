"""A verifier of two ranks under `torchrun`: the texts of one process, and an end as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies
from gateway.gateway import running as gateway_running
from slipstream.engine.factory import open_engine
from slipstream.engine.torch_engine import TorchEngine
from slipstream.rpc.channel import channel
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, verifier_pb2, worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import ROOT
from tests.fleet import Decoded, drafter, gateway, verifier
from tests.greedy import greedy

TARGET, DRAFT = str(ROOT / "models" / "target"), str(ROOT / "models" / "draft")
RANKS = 2
KV_TOKENS = 1280
LONG = 1100
"""Tokens of a prompt whose step does not fit into one broadcast."""
SHORT = 127
"""Tokens of one whose KV grows by two blocks while 64 more are generated, beyond what there is for eight of them."""
TIMEOUT_S = 6.0
GRACE_S = 20.0
"""A busy machine may take seconds for a short text of two ranks; the verifier ends with the last one in any case."""
MARK = "SLIPSTREAM_TEST_RANKS"
OUT_OF_PATIENCE = "forcefully exiting"
"""Logged by torchrun for a rank that it had to kill."""


class Torchrun:
    """A verifier of several ranks, and the log of its processes."""

    def __init__(self, log: Path) -> None:
        settings = {
            "MODEL": TARGET,
            "DTYPE": "float32",
            "LISTEN": "127.0.0.1:0",
            "KV_TOKENS": str(KV_TOKENS),
            "STEP_TOKENS": "1200",
            "PREFILL_TOKENS": "1200",
            "MEASURE_S": "0",
            "GROUP_TIMEOUT_S": str(TIMEOUT_S),
            "GRACE_S": str(GRACE_S),
        }
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m", "verifier_svc"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
        self._mark = uuid.uuid4().hex
        environment |= {f"VERIFIER_{name}": value for name, value in settings.items()} | {MARK: self._mark}
        self.log = log
        with log.open("w") as received:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=received,
                text=True,
                start_new_session=True,
            )

    def ready(self) -> Self:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready grpc="), self.log.read_text()
        self.address = line.split()[1].removeprefix("grpc=")
        ranks = {variable: pid for pid, variables in self._alive().items() for variable in variables}
        self.pids = [ranks[f"RANK={rank}".encode()] for rank in range(RANKS)]
        return self

    def _alive(self) -> dict[int, list[bytes]]:
        """All processes that inherited our mark, whatever they have become, with their variables."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    if f"{MARK}={self._mark}".encode() in variables:
                        found[int(folder.name)] = variables
        return found

    async def gone(self, within_s: float) -> float:
        """Seconds until no process is left."""
        began = time.monotonic()
        while self.process.poll() is None or self._alive():
            assert time.monotonic() - began < within_s, list(self._alive())
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    def end(self) -> None:
        for pid in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def torchrun(folder: Path) -> Iterator[Torchrun]:
    started = Torchrun(folder / "torchrun.log")
    try:
        yield started.ready()
    finally:
        started.end()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torchrun]:
    with torchrun(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module")
def target() -> TorchEngine:
    engine = open_engine(TARGET, "float32", 4096)
    assert isinstance(engine, TorchEngine)
    return engine


def prompt(number: int, length: int) -> list[int]:
    return [(17 * number + 7 * place + place * place) % 4000 + 1 for place in range(length)]


async def texts(address: str, drafters: list[str], rolled_back: bool) -> list[Decoded]:
    """Greedy and sampled sessions, all at once, which ask for more KV than there is on the ranks; one of them is rolled
    back amid its text. And one with a long prompt, alone."""
    async with gateway(address) as client, asyncio.timeout(200):
        options: dict[str, Any] = {"tokens": 8, "drafters": drafters}
        found = [await client.decode(prompt(0, LONG), **options)]
        for number in range(8):
            sampling = SamplingParams(temperature=0.0) if number % 2 else SamplingParams(temperature=1.0, seed=number)
            options = {"tokens": 64, "drafters": drafters, "sampling": sampling}
            found.append((await client.open(prompt(number, SHORT), **options))[1])
        if rolled_back:
            while len(found[3].token_ids) < 50:  # by then KV was too small for all
                await asyncio.sleep(0.001)
            kept = found[3].token_ids[:10]
            await client.command(4, close=verifier_pb2.DecodeClose())
            sampling = SamplingParams(temperature=1.0, seed=2)
            options = {"tokens": 64, "drafters": drafters, "sampling": sampling, "output": kept}
            found[3] = (await client.open(prompt(2, SHORT), epoch=2, session_id="session-4", **options))[1]
            found[3].token_ids[:0] = kept
        for each in found:
            await each.done.wait()
    return found


async def load(address: str) -> worker_pb2.WatchResponse:
    async with channel(address) as line:
        call = worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest(), timeout=10)
        loaded: worker_pb2.WatchResponse = await call.read()
        call.cancel()
    return loaded


async def test_two_ranks_say_what_one_process_says(ranks: Torchrun, target: TorchEngine) -> None:
    async with verifier(target) as alone, drafter(open_engine(DRAFT, "float32", 4096)) as guesses:
        expected = await texts(alone.address, [], rolled_back=False)
        received = await texts(ranks.address, [guesses], rolled_back=True)
    assert [each.token_ids for each in received] == [each.token_ids for each in expected]
    assert sum(each.drafted for each in received) > sum(each.accepted for each in received) > 0
    reported = await load(ranks.address)
    assert reported.preemptions > 0 and reported.kv_blocks_free == reported.kv_blocks_total == KV_TOKENS // 32


async def generate(stub: Any, number: int, tokens: int, received: list[int]) -> None:
    request = gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(token_ids=prompt(number, 20)),
        max_tokens=tokens,
        sampling=gateway_pb2.SamplingOptions(temperature=0.0),
    )
    async for event in stub.Generate(request):
        if event.HasField("delta"):
            received += event.delta.token_ids


async def test_a_rank_that_dies_takes_the_verifier_along_and_sessions_go_on_elsewhere(
    ranks: Torchrun, target: TorchEngine
) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(200):
        other = await stack.enter_async_context(verifier(target))
        config = GatewayConfig((ranks.address, other.address), TARGET, listen="127.0.0.1:0", grace_s=0.0)
        front = await stack.enter_async_context(gateway_running(config, GatewayDependencies(secrets.randbits)))
        await front.ready()
        stub = gateway_pb2_grpc.GatewayServiceStub(await stack.enter_async_context(channel(front.address)))
        received: list[list[int]] = []
        running: list[asyncio.Task[None]] = []
        while not (await load(ranks.address)).sessions:
            received.append([])
            running.append(asyncio.create_task(generate(stub, len(received) + 1, 150, received[-1])))
            while not received[-1]:
                assert not running[-1].done(), running[-1].exception()
                await asyncio.sleep(0.005)
        os.kill(ranks.pids[1], signal.SIGKILL)
        seconds = await ranks.gone(TIMEOUT_S + 60)
        print(f"SIGKILL of a rank: all processes gone after {seconds:.2f} s")
        assert ranks.process.returncode != 0
        await asyncio.gather(*running)
    for number, tokens in enumerate(received, 2):
        assert tokens == greedy(target, prompt(number, 20), 150)


async def test_a_verifier_that_is_to_end_lets_texts_finish_and_leaves_nothing_behind(
    tmp_path: Path, target: TorchEngine
) -> None:
    with torchrun(tmp_path) as ranks:
        async with gateway(ranks.address) as client:
            await asyncio.sleep(TIMEOUT_S + 1.0)  # idle for longer than any rank waits
            _, decoded = await client.open(prompt(2, 20), tokens=40)
            while not decoded.token_ids:
                await asyncio.sleep(0.001)
            ranks.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GRACE_S):
                await decoded.done.wait()
            seconds = await ranks.gone(GRACE_S + 60)
        received = ranks.log.read_text()
    print(f"SIGTERM of torchrun: all processes gone after {seconds:.2f} s")
    assert decoded.token_ids == greedy(target, prompt(2, 20), 40)
    assert OUT_OF_PATIENCE not in received and not re.search("^verifier[:,]", received, re.MULTILINE)
