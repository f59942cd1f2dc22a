"""A drafting step that several tenants share: how long it is, who is in it, and that nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.proposers.drafting.shares import DraftCost, DraftShares, Want
from slipstream.proposers.drafting.step import DraftStepLimits, plan_step
from slipstream.speculation.sampling_params import SamplingParams

LEVEL_S, TOKEN_S = 0.0003, 0.00002


def session(tenant: str, unread: int = 1) -> DraftSession:
    tokens = [1] * (9 + unread)
    policy = DraftPolicy(100, 0.0)
    return DraftSession(1, SamplingParams(), policy, tokens, 9, 100_000, tenant=tenant, computed=9)


def learnt() -> DraftShares:
    shares, chance = DraftShares(), random.Random(7)
    for _ in range(50):
        levels, tokens = chance.randint(1, 3), chance.randint(1, 100)
        shares.cost.observe(levels, tokens, LEVEL_S * levels + TOKEN_S * tokens)
    return shares


def test_cost_is_found_from_levels_and_tokens() -> None:
    cost = learnt().cost
    assert (cost.level_s, cost.token_s) == (pytest.approx(LEVEL_S), pytest.approx(TOKEN_S))
    assert cost.free_tokens(2) == pytest.approx(2 * LEVEL_S / TOKEN_S)
    alike = DraftCost()
    for _ in range(5):
        alike.observe(1, 10, 0.001)
    assert alike.free_tokens(1) == 0.0, "nothing tells one from the other: no token is free"


@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_a_step_takes_at_most_twice_as_long_as_the_other_tenant_s_own(count: int) -> None:
    one, many = session("one"), [session("many") for _ in range(count)]
    wants = [*(Want(each, 5, False) for each in many), Want(one, 5, False)]
    given = learnt().divide(wants, ["many", "one"], 1, 512)
    assert given[one] == 5
    assert LEVEL_S + TOKEN_S * sum(given.values()) <= 2 * (LEVEL_S + TOKEN_S * 5) + 5 * TOKEN_S
    assert len(given) - 1 >= min(count, 3)


def test_while_a_tenant_rests_steps_are_as_short_as_if_it_did_not() -> None:
    shares, one, many = learnt(), session("one"), [session("many") for _ in range(64)]
    wants = [Want(each, 5, False) for each in many]
    assert len(shares.divide(wants, ["many"], 1, 512)) == 64
    shares.divide([Want(one, 5, False)], ["many", "one"], 1, 512)
    assert len(shares.divide(wants, ["many", "one"], 1, 512)) <= 6


def test_a_long_prompt_is_read_in_pieces_beside_another_tenant_and_at_once_without_one() -> None:
    shares, prompt, one = learnt(), session("many", 5000), session("one")
    wants = [Want(one, 5, False), Want(prompt, 5000, True)]
    read = [shares.divide(wants, ["many", "one"], 1, 512)[prompt] for _ in range(20)]
    assert 15 <= sum(read) / len(read) <= 25
    limits = DraftStepLimits(512)
    alone = plan_step([prompt], limits, 1, {"many": 1}, shares)
    assert [request.tokens for request in alone.requests] == [512]


def test_a_tenant_s_prompts_go_on_while_it_decodes() -> None:
    shares, one, prompt = learnt(), session("one"), session("many", 5000)
    decoding = [session("many") for _ in range(16)]
    wants = [Want(one, 5, False), *(Want(each, 5, False) for each in decoding), Want(prompt, 5000, True)]
    read = [shares.divide(wants, ["many", "one"], 1, 512).get(prompt, 0) for _ in range(20)]
    assert sum(read) >= 40


def test_sessions_that_find_no_room_wait_and_do_not_rest() -> None:
    shares, one, many = learnt(), session("one"), [session("many") for _ in range(64)]
    plan = plan_step([*many, one], DraftStepLimits(512), 1, {"many": 64, "one": 1}, shares)
    here = {request.session for request in plan.requests}
    assert one in here and set(plan.waiting) == {*many} - here and not plan.resting
