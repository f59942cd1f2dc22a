"""What every role pays for a request that is traced, as real processes: CPU a round, and the pace of its text.

usage: python -m benchmarks.tracing_roles [TURNS]

One emulated pair (20 ms a pass, candidates from a drafter of 1 ms), spans sent over OTLP to a collector in a process of
its own. In every turn the same requests run twice, in changing order: once without traces, once their client wants
all of them traced. What a turn's two runs differ by is given as the median over the turns, with the middle half; CPU
is all of a process's threads, the exporter's included.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.processes import ANYWHERE, EMULATED_DRAFTER, MODELS, cpu_s, started
from benchmarks.records import Row, write
from benchmarks.tracing import collector
from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint, sampled_parent
from slipstream.telemetry.spans import UNSENT_PARENT
from slipstream.v1 import gateway_pb2

TARGET = "emulated:vocabulary=512&base_ms=20"
DRAFT = "emulated:vocabulary=512&base_ms=1&acceptance=0.8"
SESSIONS, TOKENS, TURNS = 8, 240, 15


@dataclass(frozen=True, slots=True)
class Block:
    """Costs of one run of all requests."""

    cpu_ms: dict[str, float]
    """By role, for each round of a session."""
    tpot_ms: float
    """TPOT of the median session."""


@dataclass(frozen=True, slots=True)
class System:
    address: str
    roles: dict[str, int]
    """Process numbers."""

    async def block(self, traced: bool) -> Block:
        before = {name: cpu_s(pid) for name, pid in self.roles.items()}
        done = await asyncio.gather(*(self._ask(number, traced) for number in range(SESSIONS)))
        await asyncio.sleep(1.2)  # what was traced is sent once a second
        rounds = sum(each.finished.statistics.rounds for each in done)
        cpu_ms = {name: 1e3 * (cpu_s(pid) - before[name]) / rounds for name, pid in self.roles.items()}
        return Block(cpu_ms, statistics.median(1e3 * (each.tpot_s or 0.0) for each in done))

    async def _ask(self, number: int, traced: bool) -> Completion:
        named = (sampled_parent(), UNSENT_PARENT) if traced else ("", "")
        request = gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(token_ids=[number, 8, 9]),
            max_tokens=TOKENS,
            ignore_eos=True,
            sampling=gateway_pb2.SamplingOptions(temperature=0.0),
        )
        async with GatewayEndpoint(self.address, traceparent=named[0], tracestate=named[1]).channel() as line:
            completion = await complete(line, request)
        assert bool(completion.trace_id) == traced
        return completion


@asynccontextmanager
async def serving(spans: str) -> AsyncIterator[System]:
    """Every role sends its spans to the collector at this address."""
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{spans}", "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    async with AsyncExitStack() as stack:
        roles: dict[str, int] = {}

        async def start(module: str, prefix: str, **settings: str) -> str:
            own = {"LISTEN": ANYWHERE, "LOG_LEVEL": "error"} | settings
            named = {prefix + name: value for name, value in own.items()}
            role, address = await started(stack, module, traced | EMULATED_DRAFTER | named)
            roles[prefix.strip("_").lower()] = role.process.pid
            return address

        drafter = await start("drafter_svc", "DRAFTER_", MODEL=DRAFT)
        verifier = await start("verifier_svc", "VERIFIER_", MODEL=TARGET)
        knows = {"VERIFIERS": verifier, "DRAFTERS": f"model={drafter}", "TOKENIZER": str(MODELS / "target")}
        yield System(await start("gateway", "GATEWAY_", **knows), roles)


def row(name: str, untraced: Sequence[float], traced: Sequence[float]) -> Row:
    more = [after - before for before, after in zip(untraced, traced, strict=True)]
    low, middle, high = statistics.quantiles(more, n=4)
    usual = statistics.median(untraced)
    return {
        "of": name,
        "untraced": usual,
        "all traced, more": middle,
        "middle half": f"{low:.3f} to {high:.3f}",
        "more %": 100 * middle / usual,
    }


async def main(turns: int) -> None:
    pairs: list[dict[bool, Block]] = []
    with collector() as address:
        async with serving(address) as system:
            await system.block(False)
            for turn in range(turns):
                order = (False, True) if turn % 2 else (True, False)
                pairs.append({traced: await system.block(traced) for traced in order})
            names = sorted(system.roles)
    rows = [
        row(f"{name}, CPU ms / round", *([pair[way].cpu_ms[name] for pair in pairs] for way in (False, True)))
        for name in names
    ]
    rows.append(row("TPOT, ms", *([pair[way].tpot_ms for pair in pairs] for way in (False, True))))
    write("tracing_roles", f"python -m benchmarks.tracing_roles {turns}", rows)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS))
