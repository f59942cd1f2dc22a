"""Ten times more requests than a system can serve: latency of the served ones, and the answers to the refused ones.

usage: python -m benchmarks.overload [SECONDS] [--gateways N]

An emulated target of 20 ms a pass, whatever it holds, behind gateways that take SESSIONS at once together. First as
many clients as fit, each with one request after the other; then besides them requests that come at ten times the rate
at which those are served, and go away when they are refused; then the first clients alone again. Requests go to one
gateway after the other. Of each part: time per output token of what was served, how long a refusal took and whether it
said when to come back, after how long without the crowd all of the first clients were served, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from benchmarks.processes import ANYWHERE, MODELS, started
from benchmarks.records import Row, write
from slipstream.client.completion import Completion
from slipstream.errors import RETRY_S
from slipstream.rpc.channel import channel
from slipstream.serving.role import Role
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
    """Refusals with a time after which to retry."""


@dataclass
class System:
    gateways: list[Role]
    verifier: Role
    stubs: list[gateway_pb2_grpc.GatewayServiceStub]
    """One for each gateway."""

    async def ask(self, part: Part, number: int) -> Completion | None:
        """The `number`-th client's request; None if it was refused. Raises whatever is no refusal for want of room."""
        request = gateway_pb2.GenerateRequest(max_tokens=TOKENS, ignore_eos=True)
        request.prompt_token_ids.token_ids.extend([7, 8, 9])
        completion, began = Completion(), time.perf_counter()
        try:
            async for event in self.stubs[number % len(self.stubs)].Generate(request):
                completion.take(event)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            part.refused_s.append(time.perf_counter() - began)
            part.advised += _advised(error)
            return None
        part.served.append(completion)
        return completion


def _advised(error: grpc.aio.AioRpcError) -> bool:
    status = rpc_status.from_call(error)
    details = status.details if status is not None else ()
    return any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)


@asynccontextmanager
async def system(gateways: int) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        emulated = {"VERIFIER_MODEL": f"emulated:base_ms={1e3 * PASS_S}", "VERIFIER_MEASURE_S": "0"}
        verifier, decides = await started(stack, "verifier_svc", emulated | {"VERIFIER_LISTEN": ANYWHERE})
        settings = {
            "GATEWAY_LISTEN": ANYWHERE,
            "GATEWAY_TOKENIZER": str(MODELS / "target"),
            "GATEWAY_MAX_SESSIONS": str(SESSIONS // gateways),
            "GATEWAY_VERIFIERS": decides,
        }
        fronts = [await started(stack, "gateway", settings) for _ in range(gateways)]
        lines = [await stack.enter_async_context(channel(address)) for _, address in fronts]
        stubs = [gateway_pb2_grpc.GatewayServiceStub(line) for line in lines]
        yield System([role for role, _ in fronts], verifier, stubs)


async def steady(running: System, part: Part, number: int, until: float) -> float:
    """A client that always wants something; refused, it retries after the time in the refusal. Returns the seconds
    after `until` at which it is served."""
    while True:
        served = await running.ask(part, number)
        now = time.perf_counter()
        if served is None:
            await asyncio.sleep(RETRY_S)
        elif now >= until:
            return max(0.0, now - served.finished.statistics.e2e_s - until)


async def crowd(running: System, part: Part, until: float) -> None:
    """Requests that come when they come."""
    async with asyncio.TaskGroup() as tasks:
        for number in itertools.count():
            if time.perf_counter() >= until:
                return
            tasks.create_task(running.ask(part, number))
            await asyncio.sleep(1.0 / (TIMES * RATE))


async def phase(running: System, name: str, seconds: float, crowded: bool) -> Row:
    part, until = Part(name), time.perf_counter() + seconds
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(steady(running, part, number, until)) for number in range(SESSIONS)]
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
        "all clients served after s": max(client.result() for client in clients),
        "gateways MiB": ", ".join(f"{_resident_mib(role):.0f}" for role in running.gateways),
        "verifier MiB": _resident_mib(running.verifier),
    }


def _resident_mib(role: Role) -> float:
    lines = Path(f"/proc/{role.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


async def main(seconds: float, gateways: int) -> None:
    async with system(gateways) as running:
        await phase(running, "warm", 3.0, crowded=False)
        rows = [
            await phase(running, name, seconds, crowded)
            for name, crowded in (("as many as fit", False), ("ten times as many", True), ("after that", False))
        ]
    name = "overload" if gateways == 1 else f"overload_{gateways}_gateways"
    write(name, f"python -m benchmarks.overload {seconds:g} --gateways {gateways}", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="?", default=SECONDS)
    parser.add_argument("--gateways", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(main(given.seconds, given.gateways))
