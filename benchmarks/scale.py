"""A fleet on one machine: 4 verifiers, 8 drafters, 2 gateways as processes of their own, and 1,000 sessions at once.

usage: python -m benchmarks.scale [SESSIONS] [TOKENS]

Emulated models, so that what is measured is the system: a target of 1 s a pass, whatever it holds, and a drafter of 50
ms a pass that is right in 0.8 of all places. On two cores all 14 processes and the clients share them, hence the slow
passes. Of each verifier: how near its passes come to following each other without a gap; of the sessions: how evenly
they are served (tokens a second of each, Jain's index), and that each text is the target's own.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.processes import ANYWHERE, EMULATED_DRAFTER, MODELS, cpu_s, started
from benchmarks.records import Row, write
from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2, worker_pb2, worker_pb2_grpc

VERIFIERS, DRAFTERS, GATEWAYS = 4, 8, 2
PASS_S = 1.0
TARGET = f"emulated:vocabulary=4096&base_ms={PASS_S * 1e3:g}"
DRAFT = "emulated:vocabulary=4096&base_ms=50&acceptance=0.8&fanout=0.7"
NODES = 4


@dataclass(frozen=True, slots=True)
class Fleet:
    gateways: list[str]
    verifiers: list[str]
    roles: dict[str, list[Role]]


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        roles: dict[str, list[Role]] = {"verifier": [], "drafter": [], "gateway": []}

        async def start(name: str, module: str, settings: dict[str, str]) -> str:
            prefix = name.upper() + "_"
            own = {"LISTEN": ANYWHERE, "MAX_SESSIONS": "4096"} | settings
            role, address = await started(stack, module, {prefix + key: value for key, value in own.items()})
            roles[name].append(role)
            return address

        emulated = {key.removeprefix("DRAFTER_"): value for key, value in EMULATED_DRAFTER.items()} | {"MODEL": DRAFT}
        workers = [start("verifier", "verifier_svc", {"MODEL": TARGET, "MEASURE_S": "0"}) for _ in range(VERIFIERS)]
        workers += [start("drafter", "drafter_svc", emulated) for _ in range(DRAFTERS)]
        addresses = await asyncio.gather(*workers)
        verifiers, drafters = addresses[:VERIFIERS], addresses[VERIFIERS:]
        known = {
            "VERIFIERS": ",".join(verifiers),
            "DRAFTERS": ",".join(f"d{number}={address}" for number, address in enumerate(drafters)),
            "TOKENIZER": str(MODELS / "target"),
        }
        gateways = [await start("gateway", "gateway", known) for _ in range(GATEWAYS)]
        yield Fleet(gateways, verifiers, roles)


async def steps(verifiers: Sequence[str]) -> list[tuple[int, float]]:
    """Steps of each verifier until now, and the monotonic second of the count."""
    found = []
    for address in verifiers:
        async with channel(address) as line:
            call = worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest())
            load = await call.read()
            found.append((load.steps, time.perf_counter()))
            call.cancel()
    return found


def request(number: int, tokens: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(token_ids=[number % 4096, number // 4096 + 1, 3, 4]),
        max_tokens=tokens,
        ignore_eos=True,
        sampling=gateway_pb2.SamplingOptions(temperature=0.0),
        speculation=gateway_pb2.SpeculationOptions(max_draft_tokens=NODES),
    )


def text(target: EmulatedEngine, number: int, tokens: int) -> list[int]:
    """The target's own output for a request."""
    prompt = request(number, tokens).prompt_token_ids.token_ids
    return target.text(prompt, tokens)


async def shares(verifiers: Sequence[str], sessions: list[asyncio.Task[Completion]]) -> list[float]:
    """Share of the time in which each verifier's model was busy, from when all are until the first session ends."""
    await asyncio.sleep(4 * PASS_S)
    before = await steps(verifiers)
    await asyncio.wait(sessions, return_when=asyncio.FIRST_COMPLETED)
    after = await steps(verifiers)
    return [(b - a) * PASS_S / (end - begin) for (a, begin), (b, end) in zip(before, after, strict=True)]


def _cpu(roles: Sequence[Role]) -> float:
    return sum(cpu_s(role.process.pid) for role in roles)


async def main(sessions: int, tokens: int) -> None:
    async with fleet() as running, AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(channel(address)) for address in running.gateways]
        cpu = {name: _cpu(roles) for name, roles in running.roles.items()}
        began = time.perf_counter()
        tasks = [
            asyncio.create_task(complete(lines[number % GATEWAYS], request(number, tokens)))
            for number in range(sessions)
        ]
        busy = await shares(running.verifiers, tasks)
        completions = await asyncio.gather(*tasks)
        wall = time.perf_counter() - began
        used = {name: _cpu(roles) - cpu[name] for name, roles in running.roles.items()}
    written = sum(len(completion.token_ids) for completion in completions)
    rates = sorted(1.0 / tpot for completion in completions if (tpot := completion.tpot_s))
    rounds = sum(completion.finished.statistics.rounds for completion in completions)
    row: Row = {
        "sessions": sessions,
        "tokens": written,
        "tok/s": written / wall,
        "tokens / round": written / rounds,
        "verifiers busy, least": min(busy),
        "median": statistics.median(busy),
        "tok/s of a session, p1": rates[len(rates) // 100],
        "p50": statistics.median(rates),
        "p99": rates[-1 - len(rates) // 100],
        "Jain's index": sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates)),
    }
    row |= {f"CPU µs / token, {name}s": seconds / written * 1e6 for name, seconds in used.items()}
    target = open_engine(TARGET)
    assert isinstance(target, EmulatedEngine)
    for number, completion in enumerate(completions):
        assert completion.token_ids == text(target, number, tokens), f"session {number} has another text"
    write("scale", f"python -m benchmarks.scale {sessions} {tokens}", [row])


if __name__ == "__main__":
    asyncio.run(main(*(int(argument) for argument in sys.argv[1:3]) if sys.argv[2:] else (1000, 64)))
