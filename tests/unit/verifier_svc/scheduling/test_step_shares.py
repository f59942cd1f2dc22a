"""A step that several tenants share: how long it takes, what each commits in it, and that no session waits for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.emulated.model import LinearCost
from slipstream.speculation.candidate_tree import CandidateTree, TreeLimits
from slipstream.speculation.frame import Frame
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits, StepPlan
from verifier_svc.scheduling.step_shares import StepShares
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources

SOURCE = 1
CPU = LinearCost(0.003, 0.0005)
GPU = LinearCost(0.02, 0.0001, 0.0, 128)
SESSIONS = LinearCost(0.0022, 0.00012, 0.0006)
"""A session costs five of its tokens, as small models on a CPU have it."""
ROOM = 1e-6


def new_planner(cost: LinearCost) -> Planner:
    curve = CostCurve()
    for size in BUCKETS:
        for sessions in (1, 4, 16, 64):
            curve.record(size, sessions, [cost(size, sessions)])
    return Planner(CandidateSources(types_pb2.ModelInfo(), 0.0), StepLimits(512, 256, 0.0), curve)


def decoding(tenant: str, number: int, likely: float, candidates: int = 8, acceptance: str = "coupled") -> Session:
    """A session with so many candidates in a row, each `likely` after the one before it."""
    made = new_session(
        [1, 2, 3],
        number=number,
        max_length=1 << 20,
        computed=2,
        tenant=tenant,
        tree=CandidateTree([1, 2, 3], TreeLimits(nodes=1000, depth=1000)),
        sampling=SamplingParams(temperature=0.0, acceptance=acceptance),
        idle_since=float(number),
    )
    made.name_source(SOURCE, "model")
    logs = tuple(math.log(likely) for _ in range(candidates))
    made.tree.graft(Frame(3, 0, 1, tuple(range(10, 10 + candidates)), logs, source=SOURCE))
    return made


def reading(tenant: str, number: int, tokens: int) -> Session:
    return new_session([1] * tokens, number=number, max_length=1 << 20, arrival=number, tenant=tenant)


def rate(plan: StepPlan, tenant: str, cost: LinearCost) -> float:
    """Tokens a second that the tenant is expected to commit in steps like this one."""
    mine = [each for each in plan.step if each.session.request.tenant == tenant and each.complete]
    expected = sum(1.0 + sum(plan.paths[each.session][: len(each.selection)]) for each in mine)
    return expected / seconds(plan, cost)


def seconds(plan: StepPlan, cost: LinearCost) -> float:
    return cost(sum(each.tokens for each in plan.step), 1)


def sessions_of(tenants: list[tuple[int, float]]) -> dict[str, list[Session]]:
    return {
        f"tenant-{at}": [decoding(f"tenant-{at}", 100 * at + number, likely) for number in range(count)]
        for at, (count, likely) in enumerate(tenants)
    }


many = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 0.99)), min_size=2, max_size=4)


@settings(max_examples=30, deadline=None)
@given(many, st.sampled_from([CPU, GPU, LinearCost(0.0, 0.001), LinearCost(0.01)]))
def test_each_tenant_has_its_part_of_what_it_would_have_alone(
    tenants: list[tuple[int, float]], cost: LinearCost
) -> None:
    every = sessions_of(tenants)
    alone = {tenant: new_planner(cost).plan(own) for tenant, own in every.items()}
    together = new_planner(cost).plan([session for own in every.values() for session in own])
    shortest = min(seconds(plan, cost) for plan in alone.values())
    assert seconds(together, cost) <= len(every) * shortest + ROOM
    for tenant, plan in alone.items():
        if seconds(plan, cost) == shortest:
            assert len(every) * rate(together, tenant, cost) >= rate(plan, tenant, cost) * (1.0 - ROOM)


@settings(max_examples=30, deadline=None)
@given(many, st.sampled_from([CPU, GPU]))
def test_a_tenant_with_most_of_a_step_at_most_doubles_that_of_the_others(
    tenants: list[tuple[int, float]], cost: LinearCost
) -> None:
    every = sessions_of(tenants)
    together = new_planner(cost).plan([session for own in every.values() for session in own])
    whole = sum(each.tokens for each in together.step)
    for tenant in every:
        if 2 * sum(each.tokens for each in together.step if each.session.request.tenant == tenant) <= whole:
            continue  # without it the others have half of the tokens at least
        rest = new_planner(cost).plan([each for other, own in every.items() if other != tenant for each in own])
        assert seconds(together, cost) <= 2.0 * seconds(rest, cost) * (1.0 + ROOM)


@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_the_tenant_with_more_sessions_has_the_rest_of_twice_the_other_one_s_step(count: int) -> None:
    many = [decoding("many", number, 0.8) for number in range(count)]
    one = decoding("one", 1000, 0.8)
    alone, own = new_planner(CPU).plan([one]), new_planner(CPU).plan(many)
    together = new_planner(CPU).plan([*many, one])
    assert rate(together, "one", CPU) >= 0.5 * rate(alone, "one", CPU) * (1.0 - ROOM)
    assert rate(together, "many", CPU) >= 0.5 * rate(own, "many", CPU)
    if count == 64:  # no token fits in that would not exceed it
        assert seconds(together, CPU) + CPU.per_token_s > 2.0 * seconds(alone, CPU)


def test_sessions_left_out_of_a_step_are_in_one_of_the_next_ones() -> None:
    planner = new_planner(CPU)
    sessions = [decoding("many", number, 0.8) for number in range(64)]
    one = decoding("one", 1000, 0.8)
    waited = dict.fromkeys(sessions, 0)
    for step in range(64):
        here = {each.session for each in planner.plan([*sessions, one]).step}
        assert one in here and len(here) > 1
        for session in sessions:
            waited[session] = 0 if session in here else waited[session] + 1
            if session in here:
                session.idle_since = 1000.0 + step
        assert max(waited.values()) <= 16


def test_where_a_curve_calls_two_tokens_longer_than_two_steps_both_tenants_go_on() -> None:
    planner = new_planner(CPU)
    planner._curve.seconds = lambda tokens, sessions: 0.001 * tokens**3  # type: ignore[method-assign]
    plan = planner.plan([decoding("a", 1, 0.5, 0), decoding("b", 2, 0.5, 0)])
    assert {each.session.request.tenant for each in plan.step} == {"a", "b"}


def test_prompts_and_sessions_of_one_tenant_share_its_part() -> None:
    """Sessions that decode once took twice the other one's step, and prompts as much again."""
    alone = new_planner(CPU).plan([decoding("one", 0, 0.8)])
    sessions = [*(decoding("many", number, 0.8) for number in range(1, 5)), reading("many", 5, 5000)]
    plan = new_planner(CPU).plan([*sessions, decoding("one", 0, 0.8)])
    assert seconds(plan, CPU) <= 2.0 * seconds(alone, CPU) + ROOM
    prompt = sum(each.tokens for each in plan.step if not each.complete)
    assert prompt >= 3 and sum(each.complete for each in plan.step) >= 4


def test_a_short_prompt_s_step_is_no_longer_than_two_of_its_own() -> None:
    long, short = [reading("many", number, 5000) for number in range(4)], reading("one", 10, 8)
    plan = new_planner(CPU).plan([*long, short])
    assert {each.session for each in plan.step if each.complete} == {short}
    assert seconds(plan, CPU) <= 2.0 * CPU(8, 1) + ROOM


@pytest.mark.parametrize("count", [1, 4, 16, 64])
@pytest.mark.parametrize("tokens", [8, 26, 400])
def test_beside_many_sessions_a_prompt_goes_on_half_as_fast_as_alone(count: int, tokens: int) -> None:
    """Each of 64 sessions once had its token first; to a prompt of 26 tokens, one token a step was left."""
    many = [decoding("many", number, 0.8, 0) for number in range(count)]
    one = reading("one", 1000, tokens)
    planner = new_planner(SESSIONS)
    (alone,), together = new_planner(SESSIONS).plan([one]).step, planner.plan([*many, one])
    alone_s, own_s = SESSIONS(alone.tokens, 1), new_planner(SESSIONS).plan(many).seconds
    # A curve has one row for 12 to 22 sessions.
    seconds = planner._curve.seconds(sum(each.tokens for each in together.step), max(1, len(together.step) - 1))
    (prompt,) = [each for each in together.step if each.session is one]
    assert seconds <= 2.0 * min(alone_s, own_s) + ROOM
    assert len(together.step) > 1
    if own_s >= alone_s:
        assert prompt.tokens >= alone.tokens
    assert prompt.tokens / seconds >= 0.4 * alone.tokens / alone_s


def test_under_the_ratio_rule_a_tenant_s_candidates_count_as_its_part_too() -> None:
    drawn = [decoding("many", number, 0.8, acceptance="rejection") for number in range(16)]
    one = decoding("one", 1000, 0.8)
    alone, together = new_planner(CPU).plan([one]), new_planner(CPU).plan([*drawn, one])
    assert seconds(together, CPU) <= 2.0 * seconds(alone, CPU) + ROOM
    assert rate_of_one(together) >= 0.5 * rate_of_one(alone)


def rate_of_one(plan: StepPlan) -> float:
    (mine,) = [each for each in plan.step if each.session.request.tenant == "one"]
    return (1.0 + sum(plan.paths[mine.session][: len(mine.selection)])) / seconds(plan, CPU)


@pytest.mark.parametrize("name", ["", "key"])
def test_with_one_tenant_nothing_is_divided(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StepShares, "divide")
    sessions = [decoding(name, number, 0.3 + number / 100) for number in range(64)]
    plan = new_planner(CPU).plan([*sessions, reading(name, 100, 500)])
    assert plan.limit_s == math.inf and plan.others is None
    assert [each.session for each in plan.step[:-1]] == sessions


def test_where_all_sessions_fit_into_a_step_tenants_change_no_plan() -> None:
    """Many tenants on a device that has time for all of them: candidates go where they bring the most."""
    named = [decoding(f"tenant-{number}", number, 0.5 + number / 50) for number in range(16)]
    together = [decoding("", number, 0.5 + number / 50) for number in range(16)]
    counts = [[len(each.selection) for each in new_planner(GPU).plan(sessions).step] for sessions in (named, together)]
    assert counts[0] == counts[1]


def test_beside_many_tenants_one_with_many_sessions_has_what_doubles_their_step() -> None:
    """Not a share like each of theirs: alone each would take more candidates than it does beside the others."""
    others = sessions_of([(1, 0.8)] * 63)
    rest = [session for own in others.values() for session in own]
    many = [decoding("many", 10_000 + number, 0.8) for number in range(64)]
    without, together = new_planner(GPU).plan(rest), new_planner(GPU).plan([*rest, *many])
    assert len(together.step) == 127
    assert seconds(together, GPU) <= 2.0 * seconds(without, GPU)
    for tenant in others:
        assert rate(together, tenant, GPU) >= 0.5 * rate(without, tenant, GPU) * (1.0 - ROOM)
