"""What drafting, telling, waiting and pricing are worth, on the real drafter and verifier under a virtual clock.

Figures are exact: a pass takes its emulated time, a frame its delay, Python nothing. The emulated drafter is right at
80 % of the positions; a target pass takes 20 ms up to 16 tokens, a draft pass 2 ms.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from itertools import pairwise, repeat
from typing import Any

import pytest

from benchmarks.virtual import Outcome, World, decode, open_request, system
from capacity.cell import Cell, Simulation
from capacity.clock import run
from capacity.settings import Acceptance, DraftSettings, Verifying
from slipstream.engine.emulated.model import LinearCost
from slipstream.v1 import drafter_pb2, verifier_pb2
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepPlan
from verifier_svc.wait_policy.draft_threshold import LEVELS, PAUSE

WORLD = World()
DELAYS_MS = (0, 1, 2, 5, 10, 20, 50)
SHORT = {(0, 8), (2, 4), (10, 8), (50, 4), (50, 8)}
"""Delays and candidates of the short suite: none, some and much delay, with few candidates and many."""
MOST_BYTES = 120
"""From drafter to verifier, for a token of output. The shipped pair sends half of that (`benchmarks.wire`)."""


@cache
def measured(world: World, sessions: int, tokens: int, max_draft_tokens: int) -> Outcome:
    outcome: Outcome = run(decode(world, sessions, tokens, max_draft_tokens))
    return outcome


def texts(outcome: Outcome) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {}
    for round in outcome.rounds:
        said.setdefault(round.session, []).extend(round.token_ids)
    return said


def plain(world: World, sessions: int, tokens: int) -> Outcome:
    return measured(replace(world, delay_s=0.0), sessions, tokens, 0)


def speculated(delay_ms: float, sessions: int, tokens: int, max_draft_tokens: int, world: World = WORLD) -> Outcome:
    """Says what plain decoding says."""
    outcome = measured(replace(world, delay_s=delay_ms / 1000.0), sessions, tokens, max_draft_tokens)
    without = plain(world, sessions, tokens)
    assert texts(outcome) == texts(without)
    assert all(len(text) == tokens for text in texts(outcome).values())
    return outcome


@pytest.mark.parametrize(
    ("delay_ms", "max_draft_tokens"),
    [
        pytest.param(delay_ms, most, marks=() if (delay_ms, most) in SHORT else pytest.mark.slow)
        for delay_ms in DELAYS_MS
        for most in (4, 8)
    ],
)
def test_no_delay_makes_it_slower_than_plain_decoding(delay_ms: int, max_draft_tokens: int) -> None:
    outcome = speculated(delay_ms, 1, 120, max_draft_tokens)
    assert outcome.tokens_per_s >= 1.2 * plain(WORLD, 1, 120).tokens_per_s


@pytest.mark.parametrize("sessions", [1, 4])
def test_a_drafter_far_slower_than_the_verifier_costs_nothing(sessions: int) -> None:
    """A draft pass takes as long as twenty of the target: what comes is late, and little is waited for."""
    world = World(target=LinearCost(0.005), draft=LinearCost(0.1), acceptance=0.5)
    outcome, without = speculated(1, sessions, 400, 8, world), plain(world, sessions, 400)
    assert outcome.tokens_per_s >= 0.98 * without.tokens_per_s
    held_us, wall_us = sum(done.bubble_us for done in outcome.rounds), 1e6 * outcome.seconds * sessions
    assert held_us <= 0.02 * wall_us


@pytest.mark.parametrize(("delay_ms", "sessions"), [(20, 1), (1000, 1), (20, 4)])
def test_no_step_is_held_back_for_longer_than_two(delay_ms: int, sessions: int) -> None:
    """Whenever candidates come, if they come at all."""
    outcome = speculated(delay_ms, sessions, 120, 8)
    assert max(done.bubble_us for done in outcome.rounds) <= 2 * 20_000


@pytest.mark.parametrize(
    "delay_ms", [pytest.param(each, marks=() if (each, 8) in SHORT else pytest.mark.slow) for each in DELAYS_MS]
)
def test_candidates_cost_few_bytes_at_any_delay(delay_ms: int) -> None:
    outcome = speculated(delay_ms, 1, 120, 8)
    assert 0 < outcome.candidate_bytes <= MOST_BYTES * outcome.tokens


@pytest.mark.parametrize(("delay_ms", "share"), [(1, 0.96), (2, 0.9)])
def test_a_round_trip_that_fits_into_a_target_pass_is_nearly_hidden_with_8_candidates(
    delay_ms: int, share: float
) -> None:
    """Two milliseconds and eight passes of two fill a pass of twenty exactly."""
    assert speculated(delay_ms, 1, 250, 8).tokens_per_s >= share * speculated(0, 1, 250, 8).tokens_per_s


@pytest.mark.parametrize("delay_ms", [1, 3, 6])
def test_a_round_trip_that_fits_into_a_target_pass_is_hidden_with_4_candidates_of_some_sessions(delay_ms: int) -> None:
    """Four sessions: where one has nothing after a miss, the others' candidates fill the pass that does not wait."""
    assert speculated(delay_ms, 4, 150, 4).tokens_per_s >= 0.92 * speculated(0, 4, 150, 4).tokens_per_s


def test_alone_a_session_pays_for_the_round_trip_after_a_miss_that_no_alternative_covered() -> None:
    """6 % of the positions. Its next candidates come 2 * 6 + 2 ms later, instead of 2."""
    assert speculated(6, 1, 250, 4).tokens_per_s >= 0.86 * speculated(0, 1, 250, 4).tokens_per_s


def test_a_confident_drafter_that_runs_far_ahead_stays_within_the_verifiers_tree() -> None:
    """What lies too deep there is dropped, and all that hangs below it: it must not be told before it is near."""
    sure = replace(WORLD, acceptance=1.0, draft=LinearCost(0.0002))
    rates = [speculated(0, 1, 300, most, sure).tokens_per_s for most in (8, 16)]
    assert rates[1] > 1.3 * rates[0] > 1.3 * 8 * plain(sure, 1, 300).tokens_per_s


def test_figures_repeat_to_the_last_digit() -> None:
    world = replace(WORLD, delay_s=0.005)
    first, second = (run(decode(world, 3, 60, 8)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_where_time_is_proportional_to_tokens_speculation_pauses_and_costs_nothing(delay_ms: int) -> None:
    busy = replace(WORLD, target=LinearCost(0.0, 0.002))
    outcome = speculated(delay_ms, 32, 64, 8, busy)
    assert outcome.tokens_per_s >= 0.99 * plain(busy, 32, 64).tokens_per_s
    drafted = [round.drafted for round in outcome.rounds]
    assert sum(drafted) <= 0.02 * outcome.tokens and not any(drafted[len(drafted) // 4 :])
    # The first step reads prompts, and says nothing of what decoding costs: drafters are told one step later.
    assert outcome.draft_steps <= 2.3 * outcome.steps and outcome.candidate_bytes <= 9 * outcome.tokens


@pytest.mark.parametrize(("draft_s", "worst"), [pytest.param(0.002, 0.72, marks=pytest.mark.slow), (0.006, 0.46)])
def test_a_drafter_that_takes_the_target_s_time_pauses_because_less_is_committed(draft_s: float, worst: float) -> None:
    """No cost curve holds what a draft pass on the target's core costs: the target waits for it. With drafting
    all the time (`worst`) a verifier commits so much of what it does without."""
    shared = replace(WORLD, target=LinearCost(0.005), draft=LinearCost(draft_s), one_core=True)
    outcome = speculated(0, 1, 1500, 8, shared)
    first = sum(each.wait_us + each.verify_us for each in outcome.rounds[:60]) / 60
    assert 5000 / first < worst
    assert outcome.draft_steps < 250 and outcome.tokens_per_s >= 0.86 * plain(shared, 1, 1500).tokens_per_s
    last = sum(each.wait_us + each.verify_us for each in outcome.rounds[-1000:]) / 1000
    assert 5000 / last > 0.99


def test_where_passes_cost_the_same_whatever_is_in_them_many_sessions_go_on_speculating() -> None:
    flat = replace(WORLD, target=LinearCost(0.020))
    assert speculated(0, 16, 40, 4, flat).tokens_per_s >= 1.8 * plain(flat, 16, 40).tokens_per_s


@pytest.mark.parametrize("sessions", [1, 4, 16])
def test_the_number_of_sessions_that_need_the_drafter_agrees_with_the_simulation(sessions: int) -> None:
    """A lone one less than half of the time, though the drafter never rests; what drafters are scaled by."""
    delay_s, tokens = 0.0005, 60
    target, draft = (0.020, 0.0002, 0.0, 64), (0.005, 0.00004, 0.0, 64)
    outcome = measured(World(delay_s, LinearCost(*target), LinearCost(*draft)), sessions, tokens, 8)
    verifying = Verifying(LinearCost(*target), Acceptance([WORLD.acceptance], WORLD.fanout), max_draft_tokens=8)
    with Simulation(Cell(verifying, DraftSettings(LinearCost(*draft), delay_s=delay_s))) as simulation:
        simulation.open_closed_loop(repeat((4, tokens), sessions), sessions)
        planned = simulation.observe()
    assert outcome.needed == pytest.approx(planned.drafters_needed, rel=0.2)
    assert 0.3 * sessions < outcome.needed < 0.6 * sessions
    assert sessions > 1 or planned.drafters_busy > 0.95


def test_a_drafter_that_pauses_is_sent_nothing_and_then_all_tokens_in_between_at_once() -> None:
    async def decode_with_a_pause() -> tuple[list[int], list[verifier_pb2.Round]]:
        """Commits sent before the pause, in it and after it; the rounds."""
        commits: list[drafter_pb2.DraftCommit] = []
        replies: list[Any] = []
        async with system(WORLD) as running:
            forward = running.link.send

            def send(command: drafter_pb2.DraftCommand) -> None:
                if command.HasField("commit"):
                    commits.append(command.commit)
                forward(command)

            running.link.send = send  # type: ignore[method-assign]
            sources, gateway = running.scheduler._sources, running.gateway()
            gateway.receive(open_request(0, 120, 8, running.drafter))
            sent: list[int] = []
            for threshold in (LEVELS[0], PAUSE, LEVELS[0]):
                sources.set_threshold(threshold)
                await asyncio.sleep(0.3)
                sent.append(len(commits) - sum(sent))
            while not any(isinstance(reply, verifier_pb2.SessionEnd) for reply in replies):
                replies += await gateway.outbox.take()
        assert all(a.base_length + len(a.token_ids) == b.base_length for a, b in pairwise(commits))
        return sent, [reply for reply in replies if isinstance(reply, verifier_pb2.Round)]

    sent, rounds = run(decode_with_a_pause())
    assert sent[0] > 10 and sent[1] <= 1 and sent[2] > 10
    drafted = [each.drafted for each in rounds]
    assert 0 in drafted[sent[0] + 3 : sent[0] + 12] and min(drafted[-10:-3]) > 0
    assert [token for each in rounds for token in each.token_ids] == texts(plain(WORLD, 1, 120))[0]


class Patient(Planner):
    """Holds every step back for a second."""

    def hold_s(self, plan: StepPlan, waited_s: float) -> float:
        return max(0.0, 1.0 - waited_s)


def test_a_wait_that_ends_with_its_session_is_not_the_next_one_s() -> None:
    """It once went on until somebody came, minutes later, whose first step was then held to have waited for so long."""

    async def waited_s() -> float:
        async with system(replace(WORLD, planner=Patient)) as running:
            gateway = running.gateway()
            gateway.receive(open_request(0, 1, 0, running.drafter))
            await asyncio.sleep(0.5)
            close = verifier_pb2.DecodeCommand(session=0, epoch=1, close=verifier_pb2.DecodeClose())
            gateway.receive(verifier_pb2.DecodeRequest(commands=[close]))
            await asyncio.sleep(600.0)
            gateway.receive(open_request(1, 1, 0, running.drafter))
            await asyncio.sleep(2.0)
            assert running.scheduler.steps == 1
            return running.stats.waited_s

    assert run(waited_s()) == pytest.approx(1.0)
