"""A day of several regions: fleets that follow the traffic, and what they cost against fleets that do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from capacity.scenario import Scenario
from capacity.sizing import FleetPlan, fleet
from capacity.stationary import CellState

PER_HOUR = 4
GRAIN = 0.01
"""Requests a second of a verifier to which its state is computed."""
ROUNDINGS = 4
"""Fleets grow in whole cells, so that their sessions are not quite proportional to traffic."""


@dataclass(frozen=True, slots=True)
class Moment:
    """All regions together."""

    hour: float
    rate: float
    """Requests a second."""
    sessions: float
    verifiers: int
    drafters: int
    tpot_p50_s: float
    """Seconds in the region where it is worst; so are the two below."""
    tpot_p95_s: float
    ttft_p95_s: float
    tokens_per_s: float
    price_per_hour: float


def day(scenario: Scenario, plan: FleetPlan, *, scaled: bool = True) -> list[Moment]:
    """One way to serve, at every quarter of an hour. `scaled`: each region has as many cells as its traffic needs now;
    else as many as its peak needs."""
    states: dict[float, CellState] = {}
    return [_moment(scenario, plan, number / PER_HOUR, scaled, states) for number in range(24 * PER_HOUR)]


def _moment(scenario: Scenario, plan: FleetPlan, hour: float, scaled: bool, states: dict[float, CellState]) -> Moment:
    verifiers = drafters = 0
    sessions = 0.0
    worst: list[CellState] = []
    for region in scenario.regions:
        rate = region.rate(hour)
        ours, theirs = fleet(plan.mode, rate if scaled else region.peak_rate, plan.most_rate)
        verifiers, drafters = verifiers + ours, drafters + theirs
        key = max(GRAIN, round(rate / ours / GRAIN) * GRAIN)
        state = states.get(key) or states.setdefault(key, plan.cells.at(key))
        sessions += ours * (state.inside + state.waiting)
        worst.append(state)
    rate = sum(region.rate(hour) for region in scenario.regions)
    return Moment(
        hour,
        rate,
        sessions,
        verifiers,
        drafters,
        max(state.tpot_s(0.5) for state in worst),
        max(state.tpot_s(0.95) for state in worst),
        max(state.ttft_s(0.95) for state in worst),
        rate * scenario.traffic.output.average,
        scenario.prices.per_hour(verifiers, drafters),
    )


def price_per_million(moments: Sequence[Moment]) -> float:
    """Price of a million of the day's output tokens."""
    return sum(m.price_per_hour for m in moments) / sum(m.tokens_per_s * 3600.0 for m in moments) * 1e6


def grown(scenario: Scenario, plan: FleetPlan, sessions: float) -> Scenario:
    """The scenario with its traffic scaled so that the peak has `sessions` concurrent sessions."""
    for _ in range(ROUNDINGS):
        share = sessions / max(moment.sessions for moment in day(scenario, plan))
        regions = [replace(region, peak_rate=region.peak_rate * share) for region in scenario.regions]
        scenario = replace(scenario, regions=regions)
    return scenario
