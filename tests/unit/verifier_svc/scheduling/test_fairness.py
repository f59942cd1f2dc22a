"""Shares: nothing is left over, nobody is starved, deficits are bounded, what does not fit comes in at last."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.fair_shares import DeficitRoundRobin, TenantDemand, fair_level, may_take_slot
from verifier_svc.scheduling import fairness
from verifier_svc.scheduling.fairness import PASSES, Ageing, Claim, turns

TENANTS = "abcdef"
demands = st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 40), max_size=6)


def divided(robin: DeficitRoundRobin[str], room: int, wanted: dict[str, int], item: int = 1) -> dict[str, int]:
    """Items that each tenant gets of a step, where each of its items takes `item` units."""
    got = dict.fromkeys(wanted, 0)

    def spend(tenant: str, units: float) -> float:
        count = min(wanted[tenant] - got[tenant], int(units / item))
        got[tenant] += count
        return float(count * item)

    robin.divide(room, {tenant: TenantDemand(count * item, item) for tenant, count in wanted.items()}, spend)
    return got


@given(st.lists(st.integers(0, 100), max_size=8), st.integers(0, 200))
def test_the_fair_level_uses_all_room_or_meets_all_demands(wanted: list[int], room: int) -> None:
    level = fair_level(wanted, room)
    assert sum(min(each, level) for each in wanted) == pytest.approx(min(room, sum(wanted)))
    assert (level == math.inf) == (sum(wanted) <= room)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), demands), min_size=1, max_size=20))
def test_steps_use_all_requested_room_and_deficits_stay_below_an_item(
    steps: list[tuple[int, dict[str, int]]],
) -> None:
    robin = DeficitRoundRobin[str]()
    for room, wanted in steps:
        got = divided(robin, room, wanted)
        assert sum(got.values()) == min(room, sum(wanted.values()))
        assert all(got[tenant] <= wanted[tenant] for tenant in wanted)
        assert all(abs(robin.owed(tenant)) <= 1.0 for tenant in TENANTS)
        assert not any(robin.owed(tenant) for tenant in TENANTS if wanted.get(tenant, 0) == got.get(tenant, 0))
        level = fair_level(wanted.values(), room)
        assert all(got[tenant] >= min(wanted[tenant], level) - 2.0 for tenant in wanted)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(2, 6), st.data())
def test_whatever_others_ask_for_no_tenant_with_demand_waits_long(room: int, tenants: int, data: st.DataObject) -> None:
    robin = DeficitRoundRobin[str]()
    waited, most = 0, 0
    for _ in range(40):
        others = {tenant: data.draw(st.integers(0, 9)) for tenant in TENANTS[1:tenants]}
        got = divided(robin, room, {"a": 5, **others})
        waited = 0 if got["a"] else waited + 1
        most = max(most, waited)
    assert most <= 2 * math.ceil(tenants / room)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(2, 6), st.integers(1, 8))
def test_tenants_with_unlimited_demand_differ_by_two_items_at_most(room: int, tenants: int, item: int) -> None:
    robin = DeficitRoundRobin[str]()
    total = dict.fromkeys(TENANTS[:tenants], 0)
    for _ in range(60):
        for tenant, count in divided(robin, max(room, item), dict.fromkeys(total, 1000), item).items():
            total[tenant] += count
    assert max(total.values()) - min(total.values()) <= 2


def test_items_of_different_sizes_get_the_same_units() -> None:
    """The large one gets its turn when it has saved up for it, and the other one what is left over then."""
    robin, got = DeficitRoundRobin[str](), {"large": 0.0, "small": 0.0}
    sizes = {"large": 7.0, "small": 1.0}

    def spend(tenant: str, units: float) -> float:
        used = sizes[tenant] * int(units / sizes[tenant])
        got[tenant] += used
        return used

    for _ in range(100):
        robin.divide(8.0, {tenant: TenantDemand(1e6, size) for tenant, size in sizes.items()}, spend)
    assert abs(got["large"] - got["small"]) <= 2 * 7.0
    assert sum(got.values()) >= 100 * 8.0 - 7.0


def test_more_requests_make_no_share_larger() -> None:
    assert divided(DeficitRoundRobin(), 100, {"many": 1000, "one": 60}) == {"many": 50, "one": 50}
    assert divided(DeficitRoundRobin(), 100, {"many": 1000, "one": 20}) == {"many": 80, "one": 20}
    assert divided(DeficitRoundRobin(), 100, {"many": 1000}) == {"many": 100}


def test_each_tenant_s_first_comes_before_any_second() -> None:
    assert turns("aaabac") == [0, 1, 2, 0, 3, 0]


def beyond_share(each: list[Claim[int]], room: int) -> set[int]:
    return fairness.beyond_share(each, fairness.share_of(each, room))


def claims(*each: tuple[str, int, bool]) -> list[Claim[int]]:
    return [Claim(number, *claim) for number, claim in enumerate(each)]


def test_a_lone_tenant_is_never_beyond_its_share() -> None:
    assert beyond_share(claims(*[("a", 10, True)] * 30), 100) == set()


def test_the_sessions_of_a_tenant_beyond_its_share_are_its_last_ones() -> None:
    assert beyond_share(claims(*[("a", 10, True)] * 9, ("b", 30, False)), 100) == {7, 8}
    assert beyond_share(claims(*[("a", 10, True)] * 5, ("b", 30, False)), 100) == set(), "all fit"
    many = beyond_share(claims(*[("a", 10, False)] * 50, *[("b", 10, False)] * 50), 100)
    assert many == {*range(5, 50), *range(55, 100)}


def test_a_session_larger_than_its_tenants_share_puts_no_later_session_beyond_it() -> None:
    both = claims(("a", 90, False), ("a", 10, False), *[("b", 10, True)] * 9)
    assert beyond_share(both, 100) == {0, *range(7, 11)}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=12), st.integers(60, 100)
)
def test_sessions_within_their_shares_fit_together(each: list[tuple[str, int, bool]], room: int) -> None:
    found = claims(*each)
    if len({claim.tenant for claim in found}) > 1:
        beyond = beyond_share(found, room)
        assert sum(claim.blocks for claim in found if claim.session not in beyond) <= room


def test_a_session_that_does_not_fit_is_overtaken_by_a_bounded_amount_and_keeps_its_age() -> None:
    ageing = Ageing[str]()
    ageing.wait("large", 10)
    for _ in range(PASSES):
        assert not ageing.aged("large")
        ageing.admit("small", 10)
    assert ageing.aged("large")
    ageing.admit("large", 10)
    assert ageing.aged("large"), "it keeps its place"
    ageing.forget("large")
    assert not ageing.aged("large")


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.lists(st.booleans(), max_size=200))
def test_however_often_one_tenant_asks_others_find_an_eighth_of_the_slots(eighth: int, asking: list[bool]) -> None:
    slots, held = 8 * eighth, {"greedy": 0, "other": 0}
    for other in asking + [True] * eighth:
        tenant = "other" if other else "greedy"
        if held["other"] == eighth:
            break
        taken = may_take_slot(tenant, held[tenant], sum(held.values()), slots)
        assert taken or tenant == "greedy"
        held[tenant] += taken


@pytest.mark.parametrize(
    ("slots", "alone", "each_of_two"), [(1, 1, 1), (7, 7, 4), (8, 7, 4), (64, 56, 30), (1024, 896, 478)]
)
def test_a_tenant_alone_gets_most_slots_and_two_get_equal_ones(slots: int, alone: int, each_of_two: int) -> None:
    def taken(tenants: str) -> int:
        held = dict.fromkeys(tenants, 0)
        for _ in range(slots):
            for tenant in tenants:
                held[tenant] += may_take_slot(tenant, held[tenant], sum(held.values()), slots)
        return held[tenants[0]]

    assert (taken("a"), taken("ab")) == (alone, each_of_two)
    assert sum(may_take_slot("", used, used, slots) for used in range(slots + 1)) == slots
