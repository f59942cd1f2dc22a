"""CPU of a verifier step outside the model's forward pass, at 1, 8 and 32 sessions.

usage: python -m benchmarks.step [TARGET DRAFT]     (default: the shipped pair)

For engines without a model: TARGET emulated:vocabulary=4096, DRAFT emulated:vocabulary=4096&acceptance=0.7

The verifier runs in this process with a meter around `forward`; drafter, gateway and load are other processes. What is
left is everything the verifier does besides: planning, judging, KV bookkeeping, grafting frames, protobuf, gRPC.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from benchmarks.load_generator import run_load
from benchmarks.processes import ANYWHERE, EMULATED_DRAFTER, MODELS
from benchmarks.prompts import held_out, request
from slipstream.engine.engine import Engine, ModelOutput
from slipstream.engine.segment import Segment
from slipstream.process import tune_runtime
from slipstream.serving.role import Role
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.verifier import running

SESSIONS = (1, 8, 32)
TOKENS = 64
TEMPERATURE = 0.7


class Meter:
    """Seconds of the model thread's CPU inside `forward`."""

    def __init__(self, engine: Engine) -> None:
        self.cpu_s = 0.0
        self._forward = engine.forward
        engine.forward = self.forward  # type: ignore[method-assign, assignment]

    def forward(self, segments: list[Segment]) -> ModelOutput:
        started = time.thread_time()
        try:
            return self._forward(segments)
        finally:
            self.cpu_s += time.thread_time() - started


@asynccontextmanager
async def metered(target: str, draft: str) -> AsyncIterator[tuple[str, Scheduler, Meter]]:
    """The gateway's address, and what the verifier in this process counts."""
    emulated = target.startswith("emulated:")
    settings = {"DRAFTER_MODEL": draft, "DRAFTER_LISTEN": ANYWHERE} | (EMULATED_DRAFTER if emulated else {})
    drafter = Role("drafter_svc", settings)
    config = VerifierConfig(model=target, listen=ANYWHERE, grace_s=0.0, kv_tokens=1 << (20 if emulated else 16))
    async with running(config) as verifier:
        tune_runtime()  # as `python -m verifier_svc` does
        meter = Meter(cast(EmbeddedExecutor, verifier.executor).engine)
        gateway = Role(
            "gateway",
            {
                "GATEWAY_LISTEN": ANYWHERE,
                "GATEWAY_VERIFIERS": verifier.address,
                "GATEWAY_DRAFTERS": f"model={await drafter.start()}",
                "GATEWAY_TOKENIZER": str(MODELS / "target") if emulated else target,
            },
        )
        try:
            yield await gateway.start(), verifier.scheduler, meter
        finally:
            await gateway.end()
            await drafter.end()


async def compare(target: str, draft: str) -> None:
    print(f"\ntarget {target}, draft {draft}")
    print("| sessions | speculation | tokens / step | forward ms / step | outside ms / step | outside µs / session |")
    print("|---|---|---|---|---|---|")
    async with metered(target, draft) as (address, scheduler, meter):
        for sessions in SESSIONS:
            for mode in ("off", "on"):
                await load(address, sessions, mode)  # warm
                steps, forward, cpu = scheduler.steps, meter.cpu_s, time.process_time()
                await load(address, sessions, mode)
                steps = scheduler.steps - steps
                forward, cpu = (meter.cpu_s - forward) / steps, (time.process_time() - cpu) / steps
                outside = cpu - forward
                print(
                    f"| {sessions} | {mode} | {sessions * TOKENS / steps:.1f} | {forward * 1e3:.2f} "
                    f"| {outside * 1e3:.2f} | {outside / sessions * 1e6:.0f} |"
                )


async def load(address: str, sessions: int, mode: str) -> None:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.step", "--load", address, str(sessions), mode
    )
    assert await client.wait() == 0


async def client(address: str, sessions: int, mode: str) -> None:
    prompts = held_out(sessions)
    requests = [request(prompt, TOKENS, speculate=mode == "on", temperature=TEMPERATURE, seed=7) for prompt in prompts]
    await run_load(address, requests, sessions)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        asyncio.run(client(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
    else:
        asyncio.run(compare(*(sys.argv[1:] or (str(MODELS / "target"), str(MODELS / "draft")))))
