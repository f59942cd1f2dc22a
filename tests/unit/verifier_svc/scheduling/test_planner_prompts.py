"""How much of prompts a step computes: what takes as long as decoding, divided among tenants; contexts count."""

from __future__ import annotations

import pytest

from slipstream.engine.emulated.model import LinearCost
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.execution.executor import ExecutorLimits
from verifier_svc.rounds.round_result import StepTiming
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.prefill import PrefillShares, PromptCost, prefill_chunks
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources

COST = LinearCost(0.01, 0.0002, 0.0, 16)


def new_planner(limits: StepLimits | None = None, cost: LinearCost = COST) -> Planner:
    curve = CostCurve()
    for size in BUCKETS:
        for sessions in (1, 4, 16):
            curve.record(size, sessions, [cost(size, sessions)])
    return Planner(CandidateSources(types_pb2.ModelInfo(), 0.0), limits or StepLimits(512, 256, 0.0), curve)


def session(number: int, tenant: str, pending: int, computed: int = 0) -> Session:
    return new_session(
        [1] * (computed + pending),
        max_length=1 << 20,
        number=number,
        arrival=number,
        tenant=tenant,
        computed=computed,
    )


def pieces(planner: Planner, sessions: list[Session]) -> dict[int, int]:
    """Tokens of each session in the next step, by its number."""
    return {each.session.request.number: len(each.pending) for each in planner.plan(sessions).step}


@pytest.mark.parametrize("decoding", [1, 4, 16])
def test_prompts_add_at_most_a_step_s_own_time_to_a_step_that_decodes(decoding: int) -> None:
    sessions = [session(number, "", 1, 9) for number in range(decoding)]
    found = pieces(new_planner(), [*sessions, session(99, "", 5000)])
    own = COST(decoding, decoding)
    assert COST(decoding + found[99], decoding) <= 2.0 * own < COST(decoding + found[99] + 2, decoding)


@pytest.mark.parametrize("tenant", ["", "one"])
@pytest.mark.parametrize("decoding", [1, 4, 16])
def test_without_keys_a_step_with_prompts_takes_what_the_setting_allows(decoding: int, tenant: str) -> None:
    """50 ms instead of two steps of some 10 ms; where keys tell tenants apart, two steps."""
    limit_s = 0.05
    sessions = [session(number, tenant, 1, 9) for number in range(decoding)]
    planner = new_planner(StepLimits(512, 256, 0.0, prompt_step_s=limit_s))
    found = pieces(planner, [*sessions, session(99, tenant, 5000)])
    most = 2.0 * COST(decoding, decoding) if tenant else limit_s
    assert COST(decoding + found[99], decoding) <= most < COST(decoding + found[99] + 2, decoding)


def test_a_step_slower_than_the_setting_is_doubled_as_ever() -> None:
    slow = LinearCost(0.08, 0.0002)
    found = pieces(
        new_planner(StepLimits(512, 512, 0.0, prompt_step_s=0.1), slow), [session(0, "", 1, 9), session(1, "", 5000)]
    )
    assert slow(1 + found[1], 1) <= 2.0 * slow(1, 1) < slow(1 + found[1] + 2, 1)


def test_where_time_is_proportional_to_tokens_a_prompt_still_goes_on() -> None:
    found = pieces(new_planner(cost=LinearCost(0.0, 0.001)), [session(0, "", 1, 9), session(1, "", 5000)])
    assert found == {0: 1, 1: 1}


def test_a_fast_machine_computes_as_much_of_a_prompt_as_the_setting_allows() -> None:
    flat = new_planner(cost=LinearCost(0.01))
    assert pieces(flat, [session(0, "", 1, 9), session(1, "", 5000)]) == {0: 1, 1: 256}


def test_alone_prompts_fill_a_step_and_beside_keys_one_that_costs_little_more_per_token() -> None:
    assert pieces(new_planner(), [session(0, "", 5000)]) == {0: 512}
    [short] = pieces(new_planner(), [session(0, "key", 5000)]).values()
    assert short < 200 and COST(short, 1) / short <= 1.25 * COST(512, 1) / 512
    assert pieces(new_planner(cost=LinearCost(0.0, 0.001)), [session(0, "key", 5000)])[0] < 20
    assert pieces(new_planner(cost=LinearCost(0.01)), [session(0, "key", 5000)]) == {0: 512}


def test_tenants_share_the_tokens_of_a_step_however_many_prompts_they_send() -> None:
    many = [session(number, "many", 3000) for number in range(16)]
    planner = new_planner()
    found = pieces(planner, [session(50, "one", 1, 9), *many, session(51, "one", 3000)])
    assert abs(sum(found[each.request.number] for each in many if each.request.number in found) - found[51]) <= 1
    found = pieces(planner, [session(50, "one", 1, 9), *many, session(51, "one", 20)])
    assert found[51] == 20


def test_sessions_that_decode_share_the_places_of_an_executor_that_bounds_them() -> None:
    bounded = new_planner(StepLimits(512, 256, 0.0, ExecutorLimits(max_sequences=8)))
    many = [session(number, "many", 1, 9) for number in range(40)]
    few = [session(number, "few", 1, 9) for number in (50, 51)]
    for each in few:
        each.idle_since = 100.0  # they waited least
    found = pieces(bounded, [*many, *few])
    assert len(found) == 8 and {50, 51} <= found.keys()


def test_the_cost_of_context_is_learned_and_makes_pieces_of_prompts_smaller() -> None:
    planner, per_pair_s = new_planner(), 2e-8
    decoding, prompt = session(0, "", 1, 9), session(1, "", 40_000)
    steps: list[float] = []
    while prompt.computed < 20_000:
        plan = planner.plan([decoding, prompt])
        piece = sum(len(each.pending) for each in plan.step if each.session is prompt)
        seconds = COST(1 + piece, 2) + per_pair_s * piece * prompt.computed
        timing = StepTiming(0.0, 0.0, seconds, 0.0, len(plan.step), 1 + piece)
        planner.feedback.observe_step(plan, timing, [None] * len(plan.step))
        prompt.computed += piece
        steps.append(seconds)
    assert max(steps[2:]) <= 2.0 * COST(1, 1) + 1e-9
    assert sum(steps[-100:]) >= 100 * 1.5 * COST(1, 1), "and not smaller than need be"


def test_where_decoding_itself_becomes_slower_a_prompt_goes_on_as_fast_as_before() -> None:
    """Its texts have longer contexts, or the machine is busy: no fault of the prompt's. It was once held to be one."""
    planner = new_planner()
    decoding, prompt = session(0, "", 1, 9), session(1, "", 400_000)
    piece, plain = 0, 0
    for _ in range(400):
        plan = planner.plan([decoding, prompt])
        pending = [len(each.pending) for each in plan.step if each.session is prompt]
        piece, plain = pending[0] if pending else piece, plain + (not pending)
        tokens = 1 + sum(pending)
        seconds = 0.02 + COST(tokens, 2)  # thrice as long as the curve gives without prompts
        planner.feedback.observe_step(
            plan, StepTiming(0.0, 0.0, seconds, 0.0, len(plan.step), tokens), [None] * len(plan.step)
        )
        prompt.computed += sum(pending)
    assert piece >= 50 and 20 <= plain <= 30


def test_the_cost_of_prompts_is_found_and_accidents_change_it_little() -> None:
    cost = PromptCost()
    for step in range(300):
        curve_s, pairs = 0.004 + 0.001 * (step % 5), 1000.0 * step
        cost.observe(0.01, curve_s, pairs, 0.01 + 1.5 * curve_s + 2e-8 * pairs)
    for curve_s, pairs in ((0.004, 300_000.0), (0.008, 250_000.0), (0.006, 330_000.0)):
        found = cost.factor * curve_s + cost.per_pair_s * pairs
        assert found == pytest.approx(1.5 * curve_s + 2e-8 * pairs, rel=0.05)
    cost.observe(0.01, 0.004, 1e5, 10.0)
    assert cost.per_pair_s <= 4e-8 and cost.factor <= 3.0
    for _ in range(50):
        cost.observe(0.01, 0.0, 0.0, 0.01)
        cost.observe(0.01, 1e-18, 0.0, 0.01 - 1e-18)
    assert 0.5 <= cost.factor <= 3.0, "steps of which prompts take nothing show nothing"


def test_a_prompt_behind_a_long_context_goes_on_however_dear_its_tokens_are() -> None:
    shares = PrefillShares()
    long, short = session(0, "a", 9000, 50_000), session(1, "a", 9000)
    for _ in range(10):
        assert min(shares.divide([long, short], 10, 1.0).values()) >= 1
    assert sum(shares.divide([long, short], 10, 1.0).values()) <= 10


def test_half_of_a_tenants_prefill_goes_to_its_first_prompt_and_half_to_its_shortest() -> None:
    prompts = [session(0, "", 900), session(1, "", 800), session(2, "", 30)]
    chunks = prefill_chunks(prompts, 100)
    assert {each.request.number: size for each, size in chunks.items()} == {0: 50, 1: 20, 2: 30}
