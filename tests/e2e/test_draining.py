"""SIGTERM amid texts: short ones finish where they are, long ones go on elsewhere, the worker ends with status 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from slipstream.rpc.channel import channel
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import ROOT, starting
from tests.support.follower import Follower

PASS_MS = 50
SHORT, LONG = 20, 20_000
GRACE_S = 3.0


@dataclass
class Worker:
    role: Role
    address: str
    watch: Any

    async def end(self) -> tuple[int, float]:
        """SIGTERM: its exit status, and the seconds it took."""
        began = time.monotonic()
        process = self.role.process
        process.terminate()
        async with asyncio.timeout(120):
            return await process.wait(), time.monotonic() - began

    async def sessions(self) -> int:
        load = await self._load()
        return int(load.sessions)

    async def until_draining(self) -> None:
        while not (await self._load()).draining:
            await asyncio.sleep(0.01)

    async def _load(self) -> worker_pb2.WatchResponse:
        call = self.watch(worker_pb2.WatchRequest(), timeout=5)
        load: worker_pb2.WatchResponse = await call.read()
        call.cancel()
        return load


@dataclass
class System:
    stub: Any
    verifiers: list[Worker]
    drafters: list[Worker]

    def follow(self, first: int, tokens: int) -> Follower:
        return Follower(self.stub, [first, 8, 9], tokens)

    async def fill(self, workers: list[Worker], least: int) -> list[Follower]:
        """Long texts until all of the workers have so many sessions: a gateway may come to know them one by one."""
        texts: list[Follower] = []
        async with asyncio.timeout(180):
            while min([await worker.sessions() for worker in workers]) < least:
                texts.append(self.follow(len(texts), LONG))
                while sum([await worker.sessions() for worker in workers]) < len(texts):
                    await asyncio.sleep(0.02)
        return texts

    async def gather(self, worker: Worker, sessions: int) -> None:
        """Returns once the worker has so many."""
        async with asyncio.timeout(180):
            while await worker.sessions() != sessions:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def system(verifiers: int, drafters: int, grace_s: float = GRACE_S) -> AsyncIterator[System]:
    """So many verifiers and drafters, and a gateway."""
    async with starting() as (stack, start):

        async def worker(module: str, prefix: str, model: str) -> tuple[Worker, str]:
            settings = {"MODEL": model, "LISTEN": "127.0.0.1:0", "GRACE_S": str(grace_s), "KV_TOKENS": "200000"}
            role, address = await start(module, **{prefix + name: value for name, value in settings.items()})
            line = await stack.enter_async_context(channel(address))
            return Worker(role, address, worker_pb2_grpc.WorkerServiceStub(line).Watch), address

        target, draft = f"emulated:base_ms={PASS_MS}", "emulated:acceptance=0.9"
        started = await asyncio.gather(
            *(worker("verifier_svc", "VERIFIER_", target) for _ in range(verifiers)),
            *(worker("drafter_svc", "DRAFTER_", draft) for _ in range(drafters)),
        )
        deciding, guessing = started[:verifiers], started[verifiers:]
        _, address = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=",".join(address for _, address in deciding),
            GATEWAY_DRAFTERS=",".join(f"d{number}={address}" for number, (_, address) in enumerate(guessing)),
            GATEWAY_TOKENIZER=str(ROOT / "models" / "target"),
            GATEWAY_REHOMING_WAIT_S="300",  # on a busy machine a verifier takes long to start
        )
        line = await stack.enter_async_context(channel(address))
        stub = gateway_pb2_grpc.GatewayServiceStub(line)
        yield System(stub, [each for each, _ in deciding], [each for each, _ in guessing])


async def test_a_verifier_that_ends_lets_short_texts_finish_and_hands_long_ones_over() -> None:
    async with system(verifiers=2, drafters=1) as running:
        texts = await running.fill(running.verifiers, 2)
        leaving, staying = running.verifiers
        short = [running.follow(100 + number, SHORT) for number in range(2)]
        async with asyncio.timeout(120):
            while not all(each.tokens for each in short):
                await asyncio.sleep(0.005)
        began, ending = time.monotonic(), asyncio.create_task(leaving.end())
        await leaving.until_draining()
        late = running.follow(77, LONG)
        for each in short:
            await each.reading
        assert not ending.done() or time.monotonic() - began > GRACE_S, "the long ones still run there"
        status, seconds = await ending
        print(f"SIGTERM of a verifier: ended after {seconds:.2f} s of {GRACE_S:g} s")
        assert status == 0 and GRACE_S - 0.1 < seconds < GRACE_S + 25
        await running.gather(staying, len(texts) + 1)
        for text in [*texts, late]:
            before = len(text.tokens)
            while len(text.tokens) < before + 20:
                await asyncio.sleep(0.01)
            await text.end()


async def test_while_the_only_verifier_ends_new_sessions_wait_for_the_next_one() -> None:
    async with system(verifiers=2, drafters=0) as running:
        leaving, next_one = running.verifiers
        await next_one.end()
        old = running.follow(1, LONG)
        await running.gather(leaving, 1)
        ending = asyncio.create_task(leaving.end())
        await leaving.until_draining()
        new = running.follow(2, LONG)
        await asyncio.sleep(0.5)
        assert not new.tokens and not new.reading.done()
        await next_one.role.start({"VERIFIER_LISTEN": next_one.address})
        await ending
        for text in (old, new):
            before = len(text.tokens)
            while len(text.tokens) < before + 20:
                assert not text.reading.done(), text.reading.exception()
                await asyncio.sleep(0.01)
            await text.end()


async def test_workers_without_sessions_and_drafters_end_at_once() -> None:
    """A drafter's sessions go to another one."""
    grace_s = 60.0
    async with system(verifiers=1, drafters=2, grace_s=grace_s) as running:
        texts = await running.fill(running.drafters, 2)
        leaving, staying = running.drafters
        status, seconds = await leaving.end()
        print(f"SIGTERM of a drafter: ended after {seconds:.2f} s of {grace_s:g} s")
        assert status == 0 and seconds < grace_s
        await running.gather(staying, len(texts))
        for text in texts:
            await text.end()
        for worker in (running.verifiers[0], staying):
            await running.gather(worker, 0)
            status, seconds = await worker.end()
            assert status == 0 and seconds < grace_s
