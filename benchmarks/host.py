"""What a verifier's step and a drafter's pass take besides the pass: `host_s`, `host_session_s` of `slipstream plan`.

usage: python -m benchmarks.host     (for a quiet machine)

The emulated pair of `benchmarks.plan_check` as real processes, at no delay, 1 to 12 sessions at once, with and without
speculation. Wall time over the steps (passes) that the metrics count, less what a pass of the emulated model takes: a
drafter that is kept busy begins one pass after the other. The last rows are the straight lines through the others.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.plan_check import DRAFT, DRAFT_MODEL, TARGET, TARGET_MODEL, Load, request
from benchmarks.processes import ANYWHERE, EMULATED_DRAFTER, MODELS, started
from benchmarks.records import Row, write
from benchmarks.virtual import VOCABULARY
from slipstream.client.client import complete
from slipstream.rpc.channel import channel
from slipstream.serving.role import Role

SESSIONS = (1, 3, 6, 12)
TOKENS = 300
STEPS, PASSES = "slipstream_verifier_step_seconds_count", "slipstream_drafter_pass_seconds_count"


@dataclass(frozen=True, slots=True)
class System:
    line: grpc.aio.Channel
    verifier: Role
    drafter: Role

    async def counted(self, *names: str) -> list[float]:
        """These metrics of verifier and drafter so far."""
        pages = [await asyncio.to_thread(_fetch, role.metrics) for role in (self.verifier, self.drafter)]
        samples = [s for page in pages for family in text_string_to_metric_families(page) for s in family.samples]
        return [sum(s.value for s in samples if s.name == name) for name in names]

    async def rates(self, sessions: int, speculate: bool, *names: str) -> list[float]:
        """By how much a second they grow while so many sessions decode."""
        load = Load(speculate, 0.0, sessions)
        await complete(self.line, request(VOCABULARY - 1, load))
        before, began = await self.counted(*names), time.perf_counter()
        await asyncio.gather(*(complete(self.line, request(number, load, TOKENS)) for number in range(sessions)))
        seconds, counted = time.perf_counter() - began, await self.counted(*names)
        return [(after - earlier) / seconds for after, earlier in zip(counted, before, strict=True)]


@asynccontextmanager
async def serving() -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:

        async def start(module: str, prefix: str, settings: Mapping[str, str]) -> tuple[Role, str]:
            here = {f"{prefix}LISTEN": ANYWHERE, f"{prefix}METRICS_LISTEN": ANYWHERE, f"{prefix}LOG_LEVEL": "error"}
            return await started(stack, module, dict(settings) | here)

        drafter, drafts = await start("drafter_svc", "DRAFTER_", EMULATED_DRAFTER | {"DRAFTER_MODEL": DRAFT_MODEL})
        verifier, verifies = await start("verifier_svc", "VERIFIER_", {"VERIFIER_MODEL": TARGET_MODEL})
        knows = {"VERIFIERS": verifies, "DRAFTERS": f"model={drafts}", "TOKENIZER": str(MODELS / "target")}
        _, address = await start("gateway", "GATEWAY_", {f"GATEWAY_{name}": value for name, value in knows.items()})
        yield System(await stack.enter_async_context(channel(address)), verifier, drafter)


async def measure(system: System, sessions: int, speculate: bool) -> Row:
    steps, passes = await system.rates(sessions, speculate, STEPS, PASSES)
    return {
        "speculation": "on" if speculate else "off",
        "sessions": sessions,
        "ms besides the verifier's pass": 1e3 * (1.0 / steps - TARGET.base_s),
        "besides the drafter's": 1e3 * (1.0 / passes - DRAFT.base_s) if speculate else None,
    }


def line(rows: list[Row], column: str) -> str:
    """a + b for each session."""
    some = [row for row in rows if row[column] is not None]
    each, base = np.polyfit([float(row["sessions"] or 0) for row in some], [float(row[column] or 0) for row in some], 1)
    return f"{base:.2f} + {each:.3f} a session"


def _fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


async def main() -> None:
    rows: list[Row] = []
    async with serving() as system:
        for speculate in (False, True):
            rows += [await measure(system, sessions, speculate) for sessions in SESSIONS]
    verifier, drafter = "ms besides the verifier's pass", "besides the drafter's"
    lines: list[Row] = []
    for speculation in ("off", "on"):
        some = [row for row in rows if row["speculation"] == speculation]
        drafts = line(some, drafter) if speculation == "on" else None
        lines.append({"speculation": speculation, "sessions": "line", verifier: line(some, verifier), drafter: drafts})
    write("host", "python -m benchmarks.host", rows + lines)


if __name__ == "__main__":
    asyncio.run(main())
