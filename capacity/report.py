"""A plan as a table, a sentence, or rows for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from capacity.day import Moment, day, price_per_million
from capacity.gpus import BITS
from capacity.scenario import Scenario
from capacity.sizing import FleetPlan
from measurement.pairs.verdict import MOST_LEVEL

Row = dict[str, str | float | int | None]


def row(plan: FleetPlan) -> Row:
    """Latencies in seconds: of a cell at the most traffic that it bears, simulated step by step, or estimated. The same
    cell has the figures to scale at: sessions of each verifier, and sessions that need each drafter at a time."""
    seen = plan.seen or plan.cells.at(plan.most_rate)
    return {
        "mode": plan.mode.name,
        "rate": plan.rate,
        "verifiers": plan.verifiers,
        "drafters": plan.drafters,
        "rate_per_verifier": plan.most_rate,
        "sessions_per_verifier": plan.state.inside,
        "limit": plan.limit,
        "simulated": plan.seen is not None,
        "ttft_p50_s": _finite(seen.ttft_s(0.5)),
        "ttft_p95_s": _finite(seen.ttft_s(0.95)),
        "tpot_p50_s": _finite(seen.tpot_s(0.5)),
        "tpot_p95_s": _finite(seen.tpot_s(0.95)),
        "tokens_per_round": plan.seen.tokens_per_round if plan.seen else None,
        "verifiers_busy": plan.seen.verifiers_busy if plan.seen else None,
        "drafters_busy": plan.seen.drafters_busy if plan.seen and plan.drafters else None,
        "scale_verifiers_at": seen.inside / (plan.mode.cell.verifiers if plan.seen else 1),
        "scale_drafters_at": plan.seen.drafters_needed if plan.seen and plan.drafters else None,
        "price_per_hour": _finite(plan.price_per_hour),
        "price_per_million_tokens": _finite(plan.price_per_million),
    }


def _drawn(title: str, caption: str = "", gap: int = 1) -> Table:
    """A table whose rows fit 80 columns: spaces between columns, and no lines."""
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), show_edge=False)


def table(scenario: Scenario, plans: Sequence[FleetPlan]) -> Table:
    traffic = scenario.traffic
    drawn = _drawn(
        f"{scenario.name}: {traffic.volume}, {traffic.output.average:g} tokens each",
        "D : V drafters to verifiers; prices of an hour and of a million output tokens; latencies in ms, p50/p95; "
        "tokens a round; requests/s of a verifier; what more of them would miss first",
    )
    drawn.add_column("D : V")
    for name in ("V", "D", "/hour", "/M tok", "TTFT", "TPOT", "tok/rd", "req/s"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("limit", no_wrap=True)
    for plan in plans:
        drawn.add_row(*_cells(plan))
    return drawn


def ratio(plan: FleetPlan) -> str:
    """The mode, as short as a table needs it."""
    return f"{plan.mode.cell.drafters} : {plan.mode.cell.verifiers}" if plan.mode.drafters else plan.mode.name


def _cells(plan: FleetPlan) -> list[str]:
    if not plan.verifiers:
        return [ratio(plan), *["-"] * 8, plan.limit]
    figures = row(plan)
    return [
        ratio(plan),
        str(plan.verifiers),
        str(plan.drafters),
        _price(plan.price_per_hour),
        f"{plan.price_per_million:.3g}",
        *(f"{_ms(figures[f'{name}_p50_s'])}/{_ms(figures[f'{name}_p95_s'])}" for name in ("ttft", "tpot")),
        f"{plan.seen.tokens_per_round:.2f}" if plan.seen else "-",
        f"{plan.most_rate:.3g}",
        plan.limit,
    ]


def _price(hourly: float) -> str:
    return f"{hourly:.0f}" if hourly >= 1000 else f"{hourly:.2f}"


def _ms(seconds: object) -> str:
    """With three digits, and never as a power of ten."""
    if not isinstance(seconds, float):
        return "-"
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def sentence(scenario: Scenario, plans: Sequence[FleetPlan]) -> str:
    """The recommendation as a sentence. `plans`: the cheapest first."""
    best = plans[0]
    if not best.verifiers:
        return "No way to serve meets this SLO; allow more, or give the verifier a faster device."
    others = [
        f"{plan.mode.name} {plan.price_per_million / best.price_per_million - 1.0:+.0%}"
        if plan.verifiers
        else f"{plan.mode.name} misses {plan.limit}"
        for plan in plans[1:]
    ]
    return (
        f"Cheapest: {best.mode.name}, {best.verifiers} verifiers and {best.drafters} drafters at "
        f"{best.price_per_million:.3g} a million tokens. Against it: {', '.join(others)}. "
        f"With more traffic than {best.most_rate * best.verifiers:.3g} requests/s it misses first: {best.limit}. "
        f"{_thresholds(row(best))}"
    )


def level_sentence(scenario: Scenario) -> str:
    """Seconds of a level of candidates beside the target's pass, of one session, and whether that can pay."""
    level_s, pass_s = scenario.drafting.cost(1, 1), scenario.verifying.cost(1, 1)
    share = level_s / pass_s
    sentence = f"A draft level takes {_ms(level_s)} ms, {share:.2g} of the target's pass of {_ms(pass_s)} ms."
    if share <= MOST_LEVEL:
        return sentence
    return (
        f"{sentence} Above {MOST_LEVEL:g} a drafter of its own does not pay: give it fewer bits, captured graphs or a "
        "faster GPU, or draft with a head in the verifier."
    )


def gpu_table(model: str, times: Mapping[str, Mapping[int, float | None]]) -> Table:
    drawn = _drawn(
        f"{model}: ms of a draft level, captured graphs", "From data sheets (docs/gpu.md); - does not fit", gap=3
    )
    drawn.add_column("GPU")
    for bits in BITS:
        drawn.add_column(f"{bits} bits", justify="right")
    drawn.add_column("16 bits pay beside passes of")
    for name, by_bits in times.items():
        half = by_bits[BITS[0]]
        sentence = "-" if half is None else f"{_ms(half / MOST_LEVEL)} ms and more"
        drawn.add_row(name, *("-" if each is None else _ms(each) for each in by_bits.values()), sentence)
    return drawn


def _thresholds(figures: Row) -> str:
    """For the autoscaler (docs/deployment.md, Scaling)."""
    needed = figures["scale_drafters_at"]
    drafters = f", and a drafter to {needed:.3g} that need one at a time" if isinstance(needed, float) else ""
    return f"Scale so that there is a verifier to {figures['scale_verifiers_at']:.3g} sessions{drafters}."


def day_rows(scenario: Scenario, plans: Sequence[FleetPlan]) -> list[Row]:
    rows: list[Row] = []
    for plan in plans:
        if plan.verifiers:
            moments, fixed = day(scenario, plan), day(scenario, plan, scaled=False)
            most = max(moments, key=lambda moment: moment.sessions)
            rows.append(_day_row(plan, moments, fixed, most))
    return rows


def _day_row(plan: FleetPlan, moments: Sequence[Moment], fixed: Sequence[Moment], most: Moment) -> Row:
    return {
        "mode": plan.mode.name,
        "sessions, most": most.sessions,
        "tok/s, most": most.tokens_per_s,
        "verifiers, least": min(moment.verifiers for moment in moments),
        "verifiers, most": max(moment.verifiers for moment in moments),
        "drafters, least": min(moment.drafters for moment in moments),
        "drafters, most": max(moment.drafters for moment in moments),
        "TPOT ms p95": 1e3 * max(moment.tpot_p95_s for moment in moments),
        "TTFT ms p95": 1e3 * max(moment.ttft_p95_s for moment in moments),
        "per M tokens, scaled": price_per_million(moments),
        "per M tokens, fixed": price_per_million(fixed),
    }


def day_table(scenario: Scenario, plans: Sequence[FleetPlan]) -> Table:
    """A column for each mode."""
    rows = day_rows(scenario, plans)
    drawn = _drawn(f"A day of {', '.join(region.name for region in scenario.regions)}")
    drawn.add_column("")
    for plan in plans:
        if plan.verifiers:
            drawn.add_column(ratio(plan), justify="right")
    for name in [name for name in rows[0] if name != "mode"] if rows else ():
        drawn.add_row(name, *(_figure(each[name]) for each in rows))
    return drawn


def _figure(value: object) -> str:
    """With four digits, or those before the point."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
