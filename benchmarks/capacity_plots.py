"""Plans of the example scenarios, as tables and plots for docs/capacity.md. Nothing here is measured.

usage: python -m benchmarks.capacity_plots load|ratio|delay|draft|world [SCENARIO.toml]

`load`: cost and latency of three ways to serve by traffic to one verifier; `ratio`: cost by drafters for each verifier
and TPOT allowed; `delay`: a lone user's speed by one-way delay; `draft`: the same by the time of a draft pass, in
either place; `world`: 100,000 sessions at once over a day in three regions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.plots import draw
from benchmarks.records import Row, write
from capacity.day import day, grown, price_per_million
from capacity.scenario import Scenario, read
from capacity.sizing import Mode, colocated, disaggregated, most_rate, plain, plan
from capacity.stationary import Cells
from slipstream.engine.emulated.model import LinearCost
from slipstream.process import tune_runtime

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "plan"
RATIOS = ((1, 4), (1, 2), (1, 1), (2, 1))
TPOT_MS = (12, 15, 20, 30, 40, 60)
DELAYS_MS = (0.1, 0.5, 1, 2, 5, 10, 20, 50)
PASS_MS = (1, 2, 3, 5, 8, 12)
SESSIONS = 100_000
Lines = list[tuple[str, list[tuple[float, float]]]]


def three(scenario: Scenario) -> Iterator[Mode]:
    yield plain(scenario)
    if (beside := colocated(scenario)) is not None:
        yield beside
    yield disaggregated(scenario, 1, 1)


def load(scenario: Scenario, name: str) -> None:
    rows: list[Row] = []
    for mode in three(scenario):
        cells = Cells(mode.cell, scenario.traffic)
        price = scenario.prices.per_hour(mode.cell.verifiers, mode.drafters) / mode.cell.verifiers
        rate = 0.25
        while (state := cells.at(rate)).stable and rate < 64.0:
            tokens = rate * scenario.traffic.output.average * 3600.0
            rows.append(
                {
                    "mode": mode.name,
                    "requests/s of a verifier": rate,
                    "sessions": state.inside,
                    "TPOT ms p50": 1e3 * state.tpot_s(0.5),
                    "p95": 1e3 * state.tpot_s(0.95),
                    "TTFT ms p50": 1e3 * state.ttft_s(0.5),
                    "price of 1 M tokens": price / tokens * 1e6,
                }
            )
            rate *= 2.0**0.5
    _write("load", name, rows)
    drawn = _lines(rows, "requests/s of a verifier", "TPOT ms p50")
    draw(f"capacity_load_{name}", f"{scenario.name}", "requests/s to one verifier", "TPOT p50, ms", drawn)


def ratio(scenario: Scenario, name: str) -> None:
    rows: list[Row] = []
    for mode in [*(mode for mode in three(scenario) if not mode.drafters), *_disaggregated(scenario)]:
        cells = Cells(mode.cell, scenario.traffic)
        price = scenario.prices.per_hour(mode.cell.verifiers, mode.drafters)
        for allowed in TPOT_MS:
            slo = replace(scenario.slo, tpot_p95_s=allowed / 1e3)
            most = most_rate(cells, replace(scenario, slo=slo))
            tokens = most * scenario.traffic.output.average * 3600.0 * mode.cell.verifiers
            rows.append(
                {
                    "mode": mode.name,
                    "TPOT ms p95 allowed": allowed,
                    "requests/s of a verifier": most,
                    "price of 1 M tokens": price / tokens * 1e6 if most else None,
                }
            )
    _write("ratio", name, rows)
    drawn = _lines(rows, "TPOT ms p95 allowed", "price of 1 M tokens")
    draw(f"capacity_ratio_{name}", scenario.name, "TPOT p95 allowed, ms", "price of 1 M tokens", drawn)


def _disaggregated(scenario: Scenario) -> Iterator[Mode]:
    return (disaggregated(scenario, *each) for each in RATIOS)


def delay(scenario: Scenario, name: str) -> None:
    rows: list[Row] = []
    for mode in three(scenario):
        for delay_ms in DELAYS_MS if mode.drafters else DELAYS_MS[:1]:
            far = replace(mode.cell, drafting=replace(scenario.drafting, delay_s=delay_ms / 1e3))
            cells = Cells(far if mode.drafters else mode.cell, scenario.traffic)
            state, light = cells.at(scenario.traffic.rate / 10.0), cells.rates.tokens_per_s[0]
            rows.append(
                {
                    "mode": mode.name,
                    "delay_ms": delay_ms if mode.drafters else None,
                    "tok/s of a lone session": light,
                    "TPOT ms p50": 1e3 * state.tpot_s(0.5),
                }
            )
    _write("delay", name, rows)
    points: Lines = _lines([row for row in rows if row["delay_ms"]], "delay_ms", "tok/s of a lone session")
    flat = [row for row in rows if not row["delay_ms"]]
    points += [(str(r["mode"]), [(d, float(r["tok/s of a lone session"] or 0)) for d in DELAYS_MS]) for r in flat]
    draw(f"capacity_delay_{name}", scenario.name, "one-way delay, ms", "tok/s of a lone session", points)


def draft(scenario: Scenario, name: str) -> None:
    rows: list[Row] = []
    for pass_ms in PASS_MS:
        cost = LinearCost(pass_ms / 1e3)
        changed = replace(scenario, colocated=cost, drafting=replace(scenario.drafting, cost=cost))
        for mode in three(changed):
            cells = Cells(mode.cell, scenario.traffic)
            rows.append(
                {
                    "mode": mode.name,
                    "draft pass, ms": pass_ms,
                    "tok/s of a lone session": cells.rates.tokens_per_s[0],
                    "requests/s within the SLO": most_rate(cells, changed),
                }
            )
    _write("draft", name, rows)
    drawn = _lines(rows, "draft pass, ms", "tok/s of a lone session")
    draw(f"capacity_draft_{name}", scenario.name, "a draft pass, ms", "tok/s of a lone session", drawn)


def world(scenario: Scenario, name: str) -> None:
    rows: list[Row] = []
    drawn: Lines = []
    many: Scenario | None = None
    for mode in three(scenario):
        made = plan(mode, scenario)
        many = many or grown(scenario, made, SESSIONS)
        moments, fixed = day(many, made), day(many, made, scaled=False)
        rows.append(
            {
                "mode": mode.name,
                "requests/s, most": max(m.rate for m in moments),
                "sessions, most": max(m.sessions for m in moments),
                "M tok/s, most": max(m.tokens_per_s for m in moments) / 1e6,
                "verifiers": f"{min(m.verifiers for m in moments)}-{max(m.verifiers for m in moments)}",
                "drafters": f"{min(m.drafters for m in moments)}-{max(m.drafters for m in moments)}",
                "TPOT ms p50": 1e3 * max(m.tpot_p50_s for m in moments),
                "p95": 1e3 * max(m.tpot_p95_s for m in moments),
                "1 M tokens, scaled": price_per_million(moments),
                "fixed": price_per_million(fixed),
            }
        )
        drawn.append((mode.name, [(m.hour, m.price_per_hour) for m in moments]))
    _write("world", name, rows)
    draw(f"capacity_world_{name}", f"{SESSIONS:,} sessions, three regions", "hour, UTC", "price of an hour", drawn)


def _write(kind: str, name: str, rows: list[Row]) -> None:
    write(f"capacity_{kind}_{name}", f"python -m benchmarks.capacity_plots {kind} examples/plan/{name}.toml", rows)


def _lines(rows: list[Row], x: str, y: str) -> Lines:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[y] is not None:
            lines.setdefault(str(row["mode"]), []).append((float(row[x] or 0.0), float(row[y] or 0.0)))
    return list(lines.items())


KINDS: dict[str, Callable[[Scenario, str], None]] = {
    "load": load,
    "ratio": ratio,
    "delay": delay,
    "draft": draft,
    "world": world,
}

if __name__ == "__main__":
    tune_runtime()
    file = Path(sys.argv[2]) if sys.argv[2:] else EXAMPLES / "h100-l4.toml"
    KINDS[sys.argv[1]](read(file), file.stem)
