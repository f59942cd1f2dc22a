"""The number of replicas: the most traffic that a cell bears within the SLO, and the fleet that bears all of it."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from capacity.cell import Cell, Outcome, Simulation
from capacity.scenario import Scenario, Traffic
from capacity.stationary import Cells, CellState
from slipstream.process import tune_runtime

RATIOS = ((1, 4), (1, 2), (1, 1), (2, 1))
"""Drafters to verifiers."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A cell is the smallest number of verifiers that has whole drafters; a fleet is many."""

    name: str
    cell: Cell

    @property
    def drafters(self) -> int:
        return self.cell.drafters if self.cell.drafting is not None else 0


def plain(scenario: Scenario) -> Mode:
    return Mode("no speculation", Cell(scenario.verifying, None, client_s=scenario.client_s))


def colocated(scenario: Scenario) -> Mode | None:
    """The draft model on the verifier's own device, its passes and the target's in turn."""
    if scenario.colocated is None:
        return None
    room = min(scenario.verifying.kv_tokens, scenario.colocated_kv_tokens or scenario.verifying.kv_tokens)
    verifying = replace(scenario.verifying, draft=scenario.colocated, kv_tokens=room)
    return Mode("co-located", Cell(verifying, None, client_s=scenario.client_s))


def disaggregated(scenario: Scenario, drafters: int, verifiers: int) -> Mode:
    cell = Cell(scenario.verifying, scenario.drafting, verifiers, drafters, scenario.client_s)
    return Mode(f"{_count(drafters, 'drafter')} : {_count(verifiers, 'verifier')}", cell)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def modes(scenario: Scenario) -> list[Mode]:
    fixed = [mode for mode in (plain(scenario), colocated(scenario)) if mode is not None]
    return fixed + [disaggregated(scenario, *ratio) for ratio in RATIOS]


PRECISION = 0.01
STEP_BACK = 0.93
TRIES = 5
WARM, COUNTED, LEAST = 15, 180, 60
"""Requests that are simulated: to each verifier before latencies are taken; to a cell, and to each verifier, while they
are."""
OVERLOAD = "verifier"
"""More traffic than its passes or its KV can hold, whatever latency is allowed."""


@dataclass(frozen=True)
class FleetPlan:
    """One mode for the whole traffic."""

    mode: Mode
    cells: Cells
    most_rate: float
    """Requests a second that one verifier bears within the SLO; 0: none."""
    rate: float
    """Requests a second of the whole traffic: the scenario's, or those that its sessions at once make of this mode."""
    verifiers: int
    drafters: int
    state: CellState
    """Long-run state of a verifier at its share of the traffic."""
    seen: Outcome | None
    """The outcome of a step-by-step simulation; None if it was not run."""
    limit: str
    """The part of the SLO that more traffic would miss first."""
    price_per_hour: float
    price_per_million: float
    """Output tokens."""


def fleet(mode: Mode, traffic: float, borne: float) -> tuple[int, int]:
    """(verifiers, drafters) for so many requests a second, or sessions at once, of which a verifier bears `borne`, in
    whole cells."""
    cells = math.ceil(traffic / (borne * mode.cell.verifiers) - 1e-9)
    return cells * mode.cell.verifiers, cells * mode.drafters


def most_rate(cells: Cells, scenario: Scenario) -> float:
    """Requests a second of one verifier whose State is within the SLO; 0 where none is."""
    low, high = 0.0, 1e-3
    while _within(cells.at(high), scenario):
        low, high = high, 2.0 * high
    while high - low > PRECISION * high and high > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _within(cells.at(middle), scenario) else (low, middle)
    return low


def _within(state: CellState, scenario: Scenario) -> bool:
    return state.stable and not missed(state, scenario)


def missed(seen: CellState | Outcome, scenario: Scenario) -> str:
    """The part of the SLO that is missed; empty if none."""
    if isinstance(seen, CellState) and not seen.stable:
        return OVERLOAD
    if seen.tpot_s(0.95) > scenario.slo.tpot_p95_s:
        return "TPOT"
    return "TTFT" if seen.ttft_s(0.95) > scenario.slo.ttft_p95_s else ""


def simulate(mode: Mode, scenario: Scenario, rate: float, inside: float) -> Outcome:
    """A cell with `rate` requests a second to each verifier, step by step, from the `inside` sessions on that each has
    in the long run."""
    seconds = max(COUNTED / mode.cell.verifiers, LEAST) / rate
    seed = scenario.traffic.typical_seed(rate * mode.cell.verifiers, WARM / rate + seconds)
    crowd = scenario.traffic.output.rest(np.random.default_rng(seed), round(inside * mode.cell.verifiers))
    with Simulation(mode.cell, seed) as simulation:
        simulation.open_crowd(map(int, crowd))
        simulation.open_arrivals(scenario.traffic.poisson(rate * mode.cell.verifiers, seed))
        simulation.observe(WARM / rate)
        return simulation.observe(simulation.now + seconds)


def plan(mode: Mode, scenario: Scenario, *, exact: bool = True) -> FleetPlan:
    """The smallest fleet of this mode. `exact`: what the simulation of a cell, step by step, finds beyond the SLO takes
    traffic from it until it is within."""
    cells = Cells(mode.cell, scenario.traffic)
    most = most_rate(cells, scenario)
    if most <= 0.0:
        least = cells.at(1e-3)
        limit = missed(least, scenario) or OVERLOAD
        return FleetPlan(mode, cells, 0.0, scenario.traffic.rate, 0, 0, least, None, limit, math.inf, math.inf)
    limit = missed(cells.at(most * (1.0 + 3.0 * PRECISION)), scenario) or OVERLOAD
    seen = simulate(mode, scenario, most, cells.at(most).inside) if exact else None
    for _ in range(TRIES):
        if seen is None or not (late := missed(seen, scenario)):
            break
        limit, most = late, most * STEP_BACK
        seen = simulate(mode, scenario, most, cells.at(most).inside)
    rate, verifiers, drafters = _size(mode, cells, scenario.traffic, most, seen)
    price = scenario.prices.per_hour(verifiers, drafters)
    tokens = rate * scenario.traffic.output.average * 3600.0
    state = cells.at(rate / verifiers)
    return FleetPlan(mode, cells, most, rate, verifiers, drafters, state, seen, limit, price, price / tokens * 1e6)


def _size(mode: Mode, cells: Cells, traffic: Traffic, most: float, seen: Outcome | None) -> tuple[float, int, int]:
    """(requests a second, verifiers, drafters) of the fleet for the traffic."""
    if not traffic.concurrency:
        return traffic.rate, *fleet(mode, traffic.rate, most)
    borne = cells.at(most).inside if seen is None else seen.inside / mode.cell.verifiers
    verifiers, drafters = fleet(mode, traffic.concurrency, borne)
    return verifiers * rate_of(cells, traffic.concurrency / verifiers, most), verifiers, drafters


def rate_of(cells: Cells, inside: float, most: float) -> float:
    """Requests a second that keep so many sessions inside one verifier, on average; at most `most`."""
    low, high = 0.0, most
    while high - low > PRECISION * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if cells.at(middle).inside < inside else (low, middle)
    return high


def _length(mode: Mode) -> float:
    """Sorts modes by the time that their plans take: the work of drafters is most of it."""
    if mode.drafters:
        return mode.drafters / mode.cell.verifiers
    return 0.0 if mode.cell.verifying.draft is not None else -1.0


def compare(
    scenario: Scenario,
    *,
    exact: bool = True,
    processes: int = 1,
    planned: Callable[[int, int, str], None] = lambda *_: None,
) -> list[FleetPlan]:
    """A plan for every mode, the cheapest first, made in so many processes at once. `planned` is called when one is
    ready, with how many are, how many there will be, and its name."""
    all_modes = modes(scenario)
    make = partial(plan, scenario=scenario, exact=exact)
    plans: list[FleetPlan] = []
    with ExitStack() as stack:
        made: Iterable[FleetPlan] = map(make, all_modes)
        if processes > 1:
            # Neither threads nor channels of this process are there in the others.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            pool = stack.enter_context(ProcessPoolExecutor(min(processes, len(all_modes)), context, tune_runtime))
            # What takes longest begins first, or it would be computed alone at the end.
            jobs = [pool.submit(make, mode) for mode in sorted(all_modes, key=_length, reverse=True)]
            made = (each.result() for each in as_completed(jobs))
        for each in made:
            plans.append(each)
            planned(len(plans), len(all_modes), each.mode.name)
    # By what a token costs: as many sessions at once are more requests where they are served faster.
    return sorted(plans, key=lambda each: each.price_per_million)
