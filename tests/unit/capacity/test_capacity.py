"""The plan's simulation against what is known exactly: queues, conservation, geometric series, the real services."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import plan_check
from capacity import stationary
from capacity.cell import Cell, Outcome, Simulation
from capacity.clock import run
from capacity.emulation import DrawingExecutor, GuessingProposer
from capacity.scenario import Lengths, Traffic
from capacity.settings import Acceptance, DraftSettings, Verifying
from capacity.stationary import Cells, Rates
from slipstream.engine.emulated.model import LinearCost
from slipstream.errors import FailedPrecondition
from slipstream.proposers.base import ROOT, DeeperLevels, Proposal, ProposerContext
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection

PASS_S = 0.020
COST = LinearCost(PASS_S, 0.0002, 0.00005, 32)
PLAIN = Verifying(COST, Acceptance([0.75], 0.7), host_s=0.001, sessions=16)
DRAFTING = DraftSettings(LinearCost(0.006))
SHORT = Traffic(Lengths(100, 1.0), Lengths(40, 0.8))


def closed(cell: Cell, at_once: int, output: int = 50, sessions: int | None = None) -> Outcome:
    with Simulation(cell) as simulation:
        simulation.open_closed_loop(repeat((1, output), sessions or at_once), at_once)
        return simulation.observe()


@pytest.mark.parametrize("sessions", [1, 7, 16])
def test_plain_decoding_takes_one_pass_a_token(sessions: int) -> None:
    seen = closed(Cell(PLAIN), sessions)
    step_s = COST(sessions, sessions) + PLAIN.host_s
    assert [session.tpot_s for session in seen.sessions] == pytest.approx([step_s] * sessions)
    assert seen.tokens_per_round == 1.0


def test_sessions_that_are_there_already_take_time_and_are_not_observed() -> None:
    with Simulation(Cell(PLAIN)) as simulation:
        simulation.open_crowd([400] * 4)
        simulation.open_closed_loop([(1, 50)], 1)
        seen = simulation.observe(sessions=1)
    (session,) = seen.sessions
    assert session.tpot_s == pytest.approx(COST(5, 5) + PLAIN.host_s)
    assert seen.tokens == 5 * 50


def test_one_place_is_a_queue_with_a_constant_service_time() -> None:
    """M/D/1: a wait of load * service / (2 (1 - load)) on average."""
    cell = Cell(replace(PLAIN, cost=LinearCost(PASS_S), host_s=0.0, sessions=1))
    draws, load = random.Random(2), 0.7
    with Simulation(cell) as simulation:
        simulation.open_arrivals((draws.expovariate(load / PASS_S), 1, 1) for _ in range(3_000))
        seen = simulation.observe()
    waited = statistics.mean(session.ttft_s for session in seen.sessions) - PASS_S
    assert waited == pytest.approx(load * PASS_S / (2.0 * (1.0 - load)), rel=0.15)
    assert seen.verifiers_busy == pytest.approx(load, rel=0.02)


@pytest.mark.parametrize(
    "cell", [Cell(PLAIN), Cell(PLAIN, DRAFTING, 2, 1), Cell(replace(PLAIN, draft=LinearCost(0.002)))]
)
def test_sessions_and_tokens_are_conserved(cell: Cell) -> None:
    sizes = [(7 * n % 900 + 1, 3 * n % 70 + 1) for n in range(40)]
    with Simulation(cell) as simulation:
        simulation.open_arrivals((0.05, *size) for size in sizes)
        seen = simulation.observe()
    assert sorted((session.prompt, session.tokens) for session in seen.sessions) == sorted(sizes)
    assert seen.tokens == sum(output for _, output in sizes)
    assert sum(session.rounds for session in seen.sessions) <= seen.tokens
    assert all(session.arrived < session.first <= session.ended for session in seen.sessions)
    # Little's law, exactly: both sides are the area under the number of sessions.
    stayed = sum(session.ended - session.arrived for session in seen.sessions)
    assert seen.inside * seen.seconds == pytest.approx(stayed)


@pytest.mark.parametrize(("right", "length"), [(0.8, 4), (0.5, 8), (0.0, 3), (1.0, 5)])
def test_a_chain_yields_the_tokens_of_the_geometric_series(right: float, length: int) -> None:
    """(1 - a^(k+1)) / (1 - a) tokens a round (Leviathan et al., 2023)."""
    chain = Selection((0,) * length, tuple(range(-1, length - 1)))
    settings = replace(PLAIN, acceptance=Acceptance([right], width=1))
    target = DrawingExecutor(settings, lambda seconds: None, random.Random(3))
    rounds = [target._walk(chain) for _ in range(4000)]
    assert all(found.path == tuple(range(len(found.path))) for found in rounds)
    brought = statistics.mean(len(found.path) + 1 for found in rounds)
    assert brought == pytest.approx(sum(right**k for k in range(length + 1)), rel=0.03)


def test_the_target_accepts_each_candidate_at_the_configured_rate() -> None:
    acceptance = Acceptance([0.6, 0.3], fanout=0.7)
    draws = random.Random(1)
    for depth in (1, 2, 9):
        taken = [acceptance.draw(depth, draws) for _ in range(8000)]
        shares = [taken.count(guess) / len(taken) for guess in range(acceptance.width)]
        assert shares == pytest.approx(acceptance.shares(depth), abs=0.02)
        assert max(taken) == acceptance.width


def context(length: int, **more: Any) -> ProposerContext:
    return ProposerContext("one", [0] * length, length, 1, 1000, SamplingParams(), **more)


def test_a_drafter_s_passes_cost_what_they_compute() -> None:
    """The prompt in pieces, then the last token and the tree above what is guessed on; deeper levels only what is new
    of them, a pass each."""
    slept: list[float] = []
    drafter = GuessingProposer(Acceptance([0.75], 0.7), DraftSettings(LinearCost(1.0, 0.01), 0.25), slept.append)
    below = DeeperLevels(2, 3, [0.0], -9.0)
    for each in (
        context(100, expand=[ROOT], max_read_tokens=60),
        context(100, expand=[ROOT]),
        context(101, expand=[1], node_tokens=[0, 0], parents=[ROOT, 0]),
        context(101, expand=[ROOT], deeper=below),
    ):
        (answer,) = drafter.propose([each])
    assert slept == pytest.approx([1.85, 1.65, 1.28, 3.25 + 0.01 + 0.03 + 0.03])
    assert isinstance(answer, Proposal) and (answer.levels, len(answer.nodes)) == (3, 28)
    parents = [guess.parent for guess in answer.nodes]
    assert parents == sorted(parents) and set(parents[:4]) == {ROOT} and len(set(parents[4:])) == 6


def test_a_session_that_no_verifier_can_hold_is_an_error() -> None:
    with pytest.raises(FailedPrecondition, match="cannot serve this traffic"):
        closed(Cell(replace(PLAIN, kv_tokens=64)), 1, output=100)


def test_a_perfect_near_drafter_fills_every_round() -> None:
    sure = replace(PLAIN, acceptance=Acceptance([1.0], width=1), max_draft_tokens=4)
    seen = closed(Cell(sure, DraftSettings(LinearCost(1e-4))), 1, output=400)
    assert seen.tokens_per_round > 4.8


def test_candidates_that_come_too_late_leave_plain_decoding() -> None:
    plain = closed(Cell(PLAIN), 4)
    far = closed(Cell(PLAIN, replace(DRAFTING, delay_s=30.0)), 4)
    assert far.tokens_per_s == pytest.approx(plain.tokens_per_s)


def test_a_drafter_that_is_never_right_costs_little() -> None:
    """Its verifier waits for it now and then."""
    wrong = closed(Cell(replace(PLAIN, acceptance=Acceptance([0.0])), DRAFTING), 4)
    assert wrong.tokens_per_round == 1.0
    assert wrong.tokens_per_s > 0.85 * closed(Cell(PLAIN), 4).tokens_per_s


def test_a_draft_model_that_costs_more_than_it_gains_is_not_used() -> None:
    """Co-located speculation is never worse than none."""
    dear = Cell(replace(PLAIN, draft=LinearCost(1.0)))
    assert closed(dear, 4).tpot_s(0.5) == pytest.approx(closed(Cell(PLAIN), 4).tpot_s(0.5))
    cheap = Cell(replace(PLAIN, draft=LinearCost(0.001)))
    assert closed(cheap, 4).tokens_per_s > 1.5 * closed(Cell(PLAIN), 4).tokens_per_s


@settings(max_examples=4, deadline=None)
@given(st.integers(1, 4), st.floats(0.3, 0.9), st.floats(0.0, 0.6))
def test_better_guesses_never_slow_a_fleet_down(sessions: int, right: float, more: float) -> None:
    def speed(acceptance: float) -> float:
        cell = Cell(replace(PLAIN, acceptance=Acceptance([acceptance], 0.5)), DRAFTING)
        return closed(cell, sessions, output=120).tokens_per_s

    assert speed(right + more * (1.0 - right)) > 0.85 * speed(right)  # luck is left


def known(speeds: list[float], room: int = 256) -> Cells:
    """Cells whose rates are given instead of simulated; prompts and hosts cost nothing."""
    cell = Cell(Verifying(LinearCost(1e-9), Acceptance([0.5]), sessions=room))
    sizes = list(range(1, len(speeds) + 1))
    nothing = [1e-9] * len(sizes)
    rates = Rates(sizes, speeds, nothing, [float(n) for n in sizes], [1.0] * len(sizes), [0.0] * len(sizes))
    return Cells(cell, Traffic(Lengths(1), Lengths(101)), measured=rates)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.05, 0.9))
def test_a_constant_speed_is_a_queue_that_shares_its_processor(load: float) -> None:
    """M/G/1-PS: load / (1 - load) sessions on average."""
    cells = known([100.0] * 2, room=4000)
    assert cells.at(load).inside == pytest.approx(load / (1.0 - load), rel=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.05, 0.5))
def test_a_speed_for_each_session_is_a_queue_without_waiting(load: float) -> None:
    """M/G/infinity: rate times the time that a session takes alone."""
    cells = known([10.0 * n for n in range(1, 257)])
    assert cells.at(load).inside == pytest.approx(load * 100 / 10.0, rel=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.1, 4.0), st.floats(1.0, 3.0))
def test_more_traffic_is_never_faster(rate: float, times: float) -> None:
    cells = known([400.0 * n / (n + 4) for n in range(1, 257)])
    less, more = cells.at(rate), cells.at(rate * times)
    assert more.inside >= less.inside
    assert more.tpot_s(0.5) >= 0.97 * less.tpot_s(0.5)
    assert more.stable <= less.stable


def test_traffic_above_the_capacity_is_reported_as_unstable() -> None:
    cells = known([100.0] * 2)
    assert cells.at(0.99).stable
    assert not cells.at(1.01).stable


def test_steps_that_are_full_of_candidates_have_room_for_prompts() -> None:
    """Else a verifier whose idle steps are full would count as overloaded at any traffic."""
    cell = Cell(replace(PLAIN, draft=LinearCost(0.001), sessions=64))
    rates = Rates([1, 64], [100.0, 3000.0], [0.02, 0.1], [8.0, 512.0], [2.0, 2.0], [0.0, 0.0])
    assert Cells(cell, SHORT, measured=rates).at(10.0).stable


@pytest.mark.parametrize("cell", [Cell(PLAIN), pytest.param(Cell(PLAIN, DRAFTING, 2, 1), marks=pytest.mark.long)])
def test_a_fleet_is_the_sum_of_its_cells(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells at once, step by step, against one at half the traffic, and against its stationary state."""
    monkeypatch.setattr(stationary, "SESSION_ROUNDS", 250)
    rate = 6.0

    def simulated(cell: Cell) -> Outcome:
        with Simulation(cell) as simulation:
            simulation.open_arrivals(SHORT.poisson(rate * cell.verifiers))
            simulation.observe(4.0)
            return simulation.observe(4.0 + 24.0 / cell.verifiers)

    one = simulated(cell)
    both = simulated(replace(cell, verifiers=2 * cell.verifiers, drafters=2 * cell.drafters))
    state = Cells(cell, SHORT).at(rate)
    assert both.tokens_per_s == pytest.approx(2.0 * one.tokens_per_s, rel=0.1)
    assert both.tpot_s(0.5) == pytest.approx(one.tpot_s(0.5), rel=0.1)
    assert state.tpot_s(0.5) == pytest.approx(one.tpot_s(0.5), rel=0.1)
    assert state.inside == pytest.approx(one.inside / cell.verifiers, rel=0.25)  # of few sessions


@pytest.mark.parametrize(
    "load", [plan_check.Load(True, 2.0, 2, sessions=4), plan_check.Load(False, 0.0, 0, 3.0, 200, 8)]
)
def test_the_services_themselves_do_what_was_planned(load: plan_check.Load) -> None:
    seen = run(plan_check.virtual(load)).figures()
    assert plan_check.predicted(load, processes=False) == pytest.approx(seen, rel=0.1)


def test_a_step_that_ends_a_prompt_waits_for_no_candidates() -> None:
    """It could not verify any. The first session teaches the verifier that waiting pays."""
    load = plan_check.Load(True, 0.0, 1, sessions=2)
    passed_s, ways_s = plan_check.TARGET(16, 1), 2 * plan_check.CLIENT_S
    assert run(plan_check.virtual(load)).ttft == pytest.approx([passed_s + ways_s] * 2, abs=ways_s / 2)
