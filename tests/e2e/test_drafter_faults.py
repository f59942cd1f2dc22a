"""Real processes: one of two drafters is killed or frozen in the middle of a text; only the speed shows it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.rpc.channel import channel
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import ROOT, starting
from tests.support.follower import Follower

SESSIONS = 4
TOKENS = 20_000
SILENCE_S = 1.0
PROMPTS = [[number, 8, 9] for number in range(SESSIONS)]


@dataclass
class System:
    stub: Any
    drafters: dict[str, tuple[Role, Any]]
    """By name: the process, and its WorkerService."""

    def pid(self, name: str) -> int:
        return self.drafters[name][0].process.pid

    async def load(self, name: str) -> int:
        """Sessions that a drafter has."""
        call = self.drafters[name][1].Watch(worker_pb2.WatchRequest(), timeout=5)
        load = await call.read()
        call.cancel()
        assert load is not grpc.aio.EOF
        return int(load.sessions)

    async def shares(self) -> dict[str, int]:
        """Sessions of each drafter, once all have one: one that is silent for a moment is given up and taken back."""
        async with asyncio.timeout(120):
            while sum((used := {name: await self.load(name) for name in self.drafters}).values()) != SESSIONS:
                await asyncio.sleep(0.02)
        return used

    async def until_has(self, name: str, sessions: int) -> float:
        """Seconds until the drafter has so many sessions."""
        began = time.monotonic()
        async with asyncio.timeout(120):
            while await self.load(name) != sessions:
                await asyncio.sleep(0.02)
        return time.monotonic() - began


async def speculation(texts: list[Follower]) -> float:
    """Seconds until candidates of every session are verified again."""
    began = time.monotonic()
    async with asyncio.timeout(120):
        before = [await text.drafted() for text in texts]
        for text, count in zip(texts, before, strict=True):
            while await text.drafted() <= count + 20:
                assert not text.reading.done(), text.reading.exception()
                await asyncio.sleep(0.02)
    return time.monotonic() - began


@asynccontextmanager
async def system() -> AsyncIterator[System]:
    """A verifier, a gateway, and two drafters that share the sessions."""
    async with starting() as (stack, start):

        async def stub(kind: Any, address: str) -> Any:
            return kind(await stack.enter_async_context(channel(address)))

        draft = {"DRAFTER_MODEL": "emulated:acceptance=0.9", "DRAFTER_LISTEN": "127.0.0.1:0"}
        started = await asyncio.gather(
            start("verifier_svc", VERIFIER_MODEL="emulated:base_ms=20", VERIFIER_LISTEN="127.0.0.1:0",
                  VERIFIER_KV_TOKENS="200000", VERIFIER_MEASURE_S="0.2", VERIFIER_SILENCE_S=str(SILENCE_S)),
            start("drafter_svc", **draft, DRAFTER_KV_TOKENS="200000"),
            start("drafter_svc", **draft, DRAFTER_KV_TOKENS="200000"),
        )  # fmt: skip
        addresses = dict(zip("ab", (address for _, address in started[1:]), strict=True))
        _, gateway = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=started[0][1],
            GATEWAY_DRAFTERS=",".join(f"{name}={address}" for name, address in addresses.items()),
            GATEWAY_TOKENIZER=str(ROOT / "models" / "target"),
        )
        workers = {name: await stub(worker_pb2_grpc.WorkerServiceStub, address) for name, address in addresses.items()}
        roles = {name: (role, workers[name]) for name, (role, _) in zip("ab", started[1:], strict=True)}
        yield System(await stub(gateway_pb2_grpc.GatewayServiceStub, gateway), roles)


def alive(pid: int) -> str:
    """The state of a process as the kernel reports it: T is stopped; empty when it is gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


async def in_the_middle(running: System) -> list[Follower]:
    """Texts that speculate."""
    texts = [Follower(running.stub, prompt, TOKENS) for prompt in PROMPTS]
    while not all(len(text.tokens) > 20 for text in texts):
        assert not any(text.reading.done() for text in texts)
        await asyncio.sleep(0.01)
    await speculation(texts)
    return texts


@pytest.mark.parametrize("fault", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP])
async def test_when_a_drafter_dies_or_freezes_its_sessions_move_to_the_other_one(fault: signal.Signals) -> None:
    """The one that freezes is the heir of one that is killed."""
    async with system() as running:
        texts = await in_the_middle(running)
        used = await running.shares()
        victim = max(used, key=lambda name: used[name])
        heir = "b" if victim == "a" else "a"
        os.kill(running.pid(victim), fault)
        moved = await running.until_has(heir, SESSIONS)
        assert alive(running.pid(victim)) in ("", "Z") if fault == signal.SIGKILL else alive(running.pid(victim)) == "T"
        print(f"{fault.name}: moved after {moved:.2f} s, all speculate after {moved + await speculation(texts):.2f} s")
        if fault == signal.SIGSTOP:
            os.kill(running.pid(victim), signal.SIGCONT)
            await running.until_has(victim, 0)  # it receives, late, that they were closed
            os.kill(running.pid(heir), signal.SIGKILL)
            await running.until_has(victim, SESSIONS)  # and is good enough to take them back
            await speculation(texts)
        for text in texts:
            await text.end()
