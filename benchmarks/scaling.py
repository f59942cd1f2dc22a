"""What an autoscaler could ask drafters: how busy they are, and how many sessions need them at a time.

usage: python -m benchmarks.scaling examples/plan/h100-l4.toml
       python -m benchmarks.scaling processes

Sessions that never end, on simulated workers of a plan's scenario (`capacity`); busy and needed are sums over drafters,
as the query of an autoscaler is. Or of the drafter of `benchmarks.host`: real processes, with emulated models.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from itertools import repeat
from pathlib import Path

from benchmarks.host import serving
from benchmarks.records import Row, write
from capacity.cell import Cell, Outcome, Simulation
from capacity.emulation import MOST_KV_TOKENS
from capacity.scenario import Scenario, read
from capacity.stationary import ENDLESS
from slipstream.telemetry import metrics

LOADS = ((1, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 2), (128, 4))
"""Sessions, verifiers."""
DRAFTERS = (1, 2, 4)
AT_ONCE = (1, 4, 12, 24)


def crowd(scenario: Scenario, sessions: int, drafters: int, verifiers: int, seconds: float) -> Outcome:
    """So many at once, a third of that time after they began; KV has room for all."""
    roomy = replace(scenario.verifying, kv_tokens=MOST_KV_TOKENS)
    with Simulation(Cell(roomy, scenario.drafting, verifiers, drafters)) as simulation:
        simulation.open_closed_loop(repeat((1, ENDLESS), sessions), sessions)
        simulation.observe(seconds / 3.0)
        return simulation.observe(simulation.now + seconds)


async def processes() -> None:
    rows: list[Row] = []
    async with serving() as system:
        for sessions in AT_ONCE:
            rates = await system.rates(sessions, True, metrics.DRAFTER_BUSY.name, metrics.DRAFTER_NEEDED.name)
            rows.append({"sessions": sessions} | dict(zip(("busy", "needed"), rates, strict=True)))
    write("scaling_processes", "python -m benchmarks.scaling processes", rows)


def simulated(path: str) -> None:
    scenario = read(Path(path))
    rows: list[Row] = []
    for sessions, verifiers in LOADS:
        row: Row = {"sessions": sessions, "verifiers": verifiers}
        for drafters in DRAFTERS:
            seen = crowd(scenario, sessions, drafters, verifiers, 3.0)
            row |= {
                f"{drafters} drafters: busy": drafters * seen.drafters_busy,
                f"{drafters}: needed": drafters * seen.drafters_needed,
                f"{drafters}: tok/s of a session": seen.tokens_per_s / sessions,
            }
        rows.append(row)
    write("scaling", f"python -m benchmarks.scaling {path}", rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["processes"]:
        asyncio.run(processes())
    else:
        simulated(*sys.argv[1:])
