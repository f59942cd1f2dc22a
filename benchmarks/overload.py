"""Ten times more requests than a system can serve: what those notice that it does serve, and what the others are told.

usage: python -m benchmarks.overload [SECONDS]

An emulated target of 20 ms a pass, whatever it holds, behind a gateway that takes SESSIONS at once. First as many
clients as fit, each with one request after the other; then besides them requests that come at ten times the rate at
which those are served, and go away when they are refused; then the first clients alone again. Of each part: time per
output token of what was served, how long a refusal took and whether it said when to come back, and memory.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from benchmarks.processes import ANYWHERE, MODELS
from benchmarks.records import Row, write
from slipstream.cli.serve import Role
from slipstream.client import channel
from slipstream.completion import Completion
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

SESSIONS, TOKENS = 16, 100
PASS_S = 0.020
TIMES = 10
SECONDS = 20.0
RATE = SESSIONS / (TOKENS * PASS_S)
"""Requests a second that are served."""


@dataclass
class Part:
    name: str
    served: list[Completion] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    advised: int = 0
    """Refusals that said when to come back."""


@dataclass
class System:
    gateway: Role
    verifier: Role
    stub: gateway_pb2_grpc.GatewayServiceStub

    async def ask(self, part: Part) -> bool:
        """Whether the request was served. Raises whatever is no refusal for want of room."""
        request = gateway_pb2.GenerateRequest(max_tokens=TOKENS, ignore_eos=True)
        request.prompt_token_ids.token_ids.extend([7, 8, 9])
        completion, began = Completion(), time.perf_counter()
        try:
            async for event in self.stub.Generate(request):
                completion.take(event)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            part.refused_s.append(time.perf_counter() - began)
            part.advised += _advised(error)
            return False
        part.served.append(completion)
        return True


def _advised(error: grpc.aio.AioRpcError) -> bool:
    status = rpc_status.from_call(error)
    details = status.details if status is not None else ()
    return any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)


@asynccontextmanager
async def system() -> AsyncIterator[System]:
    verifier = Role(
        "verifier_svc",
        {"VERIFIER_MODEL": f"emulated:base_ms={1e3 * PASS_S}", "VERIFIER_LISTEN": ANYWHERE, "VERIFIER_MEASURE_S": "0"},
    )
    settings = {
        "GATEWAY_LISTEN": ANYWHERE,
        "GATEWAY_TOKENIZER": str(MODELS / "target"),
        "GATEWAY_MAX_SESSIONS": str(SESSIONS),
    }
    gateway = Role("gateway", settings)
    try:
        address = await gateway.start({"GATEWAY_VERIFIERS": await verifier.start()})
        async with channel(address) as line:
            yield System(gateway, verifier, gateway_pb2_grpc.GatewayServiceStub(line))
    finally:
        await gateway.end()
        await verifier.end()


async def steady(running: System, part: Part, until: float) -> None:
    """A client that always wants something; refused, it comes back as it was told."""
    while time.perf_counter() < until:
        if not await running.ask(part):
            await asyncio.sleep(1.0)


async def crowd(running: System, part: Part, until: float) -> None:
    """Requests that come when they come."""
    async with asyncio.TaskGroup() as tasks:
        while time.perf_counter() < until:
            tasks.create_task(running.ask(part))
            await asyncio.sleep(1.0 / (TIMES * RATE))


async def phase(running: System, name: str, seconds: float, crowded: bool) -> Row:
    part, until = Part(name), time.perf_counter() + seconds
    async with asyncio.TaskGroup() as tasks:
        for _ in range(SESSIONS):
            tasks.create_task(steady(running, part, until))
        if crowded:
            tasks.create_task(crowd(running, part, until))
    tpot = [1e3 * (done.tpot_s or 0.0) for done in part.served]
    return {
        "part": name,
        "served": len(part.served),
        "refused": len(part.refused_s),
        "told when to come back": part.advised,
        "ms / token, median": statistics.median(tpot),
        "99 %": sorted(tpot)[int(0.99 * len(tpot))],
        "refusal ms, median": 1e3 * statistics.median(part.refused_s) if part.refused_s else None,
        "longest": 1e3 * max(part.refused_s) if part.refused_s else None,
        "gateway MiB": _resident_mib(running.gateway),
        "verifier MiB": _resident_mib(running.verifier),
    }


def _resident_mib(role: Role) -> float:
    assert role._process is not None
    lines = Path(f"/proc/{role._process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


async def main(seconds: float) -> None:
    async with system() as running:
        await phase(running, "warm", 3.0, crowded=False)
        rows = [
            await phase(running, name, seconds, crowded)
            for name, crowded in (("as many as fit", False), ("ten times as many", True), ("after that", False))
        ]
    write("overload", f"python -m benchmarks.overload {seconds:g}", rows)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if sys.argv[1:] else SECONDS))
