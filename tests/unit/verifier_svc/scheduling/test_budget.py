"""The budget against brute force, and what it promises to sessions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.scheduling.budget import Allotment, Offer
from verifier_svc.scheduling.budget import allot as allot_over

# Sixty-fourths and whole seconds: sums and products of them are exact, so that ties are ties.
descending = st.lists(st.integers(0, 64), max_size=4).map(lambda parts: [p / 64 for p in sorted(parts, reverse=True)])
offers_of_a_step = st.lists(st.builds(Offer, descending, st.integers(0, 5)), min_size=1, max_size=4)
arbitrary_costs = st.lists(st.integers(1, 40), min_size=32, max_size=32)
rising_costs = arbitrary_costs.map(sorted)


def linear(base: float, per_token: float) -> Callable[[int], float]:
    return lambda tokens: base + per_token * tokens


def allot(
    offers: list[Offer], cost: Callable[[int], float], room: int, base: int | None = None, prefill: int = 0
) -> Allotment:
    return allot_over(offers, lambda sizes: [cost(size) for size in sizes], room, base, prefill)


def rate(
    offers: list[Offer], counts: tuple[int, ...], cost: Callable[[int], float], base: int, prefill: int = 0
) -> tuple[float, int]:
    """What is to be maximised: tokens per second that prompts do not take, and among equals the smaller step."""
    chosen = sum(sum(offer.probabilities[:count]) for offer, count in zip(offers, counts, strict=True))
    prompts = cost(base + prefill) - cost(base)
    return (len(offers) + chosen) / (cost(base + prefill + sum(counts)) - prompts), -sum(counts)


def brute_force(
    offers: list[Offer], cost: Callable[[int], float], room: int, base: int, prefill: int = 0
) -> tuple[float, int]:
    choices = itertools.product(*(range(min(offer.cap, len(offer.probabilities)) + 1) for offer in offers))
    return max(rate(offers, counts, cost, base, prefill) for counts in choices if sum(counts) <= room)


@settings(max_examples=300, deadline=None)
@given(offers_of_a_step, arbitrary_costs, st.integers(0, 20), st.integers(0, 6))
def test_no_other_choice_is_better_whatever_a_step_costs(
    offers: list[Offer], costs: list[int], room: int, others: int
) -> None:
    base = len(offers) + others
    found = allot(offers, costs.__getitem__, room, base)
    value = rate(offers, tuple(found.counts), costs.__getitem__, base)
    best = brute_force(offers, costs.__getitem__, room, base)
    assert value[0] == pytest.approx(best[0], rel=1e-12)
    assert value[1] == best[1], "of equally good steps the smallest is taken"
    assert found.tokens / found.seconds == pytest.approx(value[0])


@settings(max_examples=300, deadline=None)
@given(offers_of_a_step, rising_costs, st.integers(0, 20), st.integers(0, 6))
def test_beside_prompts_no_other_choice_is_better_for_what_they_leave_of_a_step(
    offers: list[Offer], costs: list[int], room: int, prefill: int
) -> None:
    base = len(offers)
    found = allot(offers, costs.__getitem__, room, prefill=prefill)
    value = rate(offers, tuple(found.counts), costs.__getitem__, base, prefill)
    best = brute_force(offers, costs.__getitem__, room, base, prefill)
    assert value[0] == pytest.approx(best[0], rel=1e-12)
    assert value[1] == best[1], "of equally good steps the smallest is taken"
    assert found.seconds == costs[base + prefill + sum(found.counts)], "of the whole step, prompts included"


@settings(max_examples=100, deadline=None)
@given(offers_of_a_step, st.sampled_from(["concave", "convex", "steps", "falling"]), st.integers(0, 20))
def test_the_shape_of_the_curve_does_not_matter(offers: list[Offer], shape: str, room: int) -> None:
    cost: Callable[[int], float] = {
        "concave": lambda n: 1.0 + n**0.5,
        "convex": lambda n: 8.0 + n**2 / 8,
        "steps": lambda n: 4.0 + 3 * (n // 4),
        "falling": lambda n: 40.0 - n,
    }[shape]
    found = allot(offers, cost, room)
    best = brute_force(offers, cost, room, len(offers))
    assert rate(offers, tuple(found.counts), cost, len(offers))[0] == pytest.approx(best[0], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(offers_of_a_step, arbitrary_costs, st.integers(0, 20))
def test_sessions_stay_within_their_caps_and_steps_within_their_room(
    offers: list[Offer], costs: list[int], room: int
) -> None:
    counts = allot(offers, costs.__getitem__, room).counts
    assert sum(counts) <= room
    assert all(0 <= n <= min(each.cap, len(each.probabilities)) for n, each in zip(counts, offers, strict=True))


@pytest.mark.parametrize("sessions", [1, 8, 64])
def test_nothing_is_speculated_where_it_does_not_pay(sessions: int) -> None:
    """t = c * n: a token costs as much as any other, and a candidate brings less than one."""
    offers = [Offer([0.99, 0.9, 0.8], 3)] * sessions
    found = allot(offers, linear(0.0, 0.01), 512)
    assert found.counts == [0] * sessions
    assert found.tokens == sessions
    assert found.seconds == pytest.approx(0.01 * sessions)
    # A certain token at the same price is a tie, and a tie is not speculation.
    assert allot([Offer([1.0], 1)] * sessions, linear(0.0, 1.0), 512).counts == [0] * sessions


def test_speculation_fades_as_the_load_grows() -> None:
    """With a fixed cost of 64 tokens' worth, S sessions leave less and less of it to each."""
    path = [0.7**depth for depth in range(1, 17)]
    counts = [
        allot([Offer(path, 16)] * sessions, linear(64.0, 1.0), 4096).counts[0] for sessions in (1, 4, 16, 64, 256, 1024)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 6
    assert counts[-1] == 0


def test_a_session_with_unlikely_candidates_gets_no_room_but_keeps_its_own_token() -> None:
    good, poor = Offer([0.9, 0.8, 0.7], 8), Offer([0.05, 0.01], 8)
    together = allot([poor, good, Offer([], 8)], linear(10.0, 1.0), 100)
    assert together.counts == [0, 3, 0]
    assert together.tokens == pytest.approx(3 + 0.9 + 0.8 + 0.7)


def test_equal_sessions_share_scarce_room_evenly() -> None:
    counts = allot([Offer([0.5] * 8, 8)] * 3, linear(100.0, 0.01), 7).counts
    assert counts == [3, 2, 2]


def test_prompts_in_the_step_make_no_candidate_cheaper() -> None:
    """First a token costs a second, whatever it is for; then a pass takes 16 s for up to as many tokens."""
    offers = [Offer([0.3], 1)]
    assert allot(offers, linear(0.0, 1.0), 8, prefill=16).counts == [0]
    assert allot(offers, lambda n: max(16.0, float(n)), 8, prefill=4).counts == [1]
    assert allot(offers, lambda n: max(16.0, float(n)), 8, prefill=64).counts == [1], "0.3 tokens in the 17th second"


def test_candidates_out_of_order_are_chosen_as_a_prefix() -> None:
    """A node above its predecessor is worth no more than that: it cannot be had without it."""
    assert allot([Offer([0.2, 0.9], 2), Offer([0.5], 1)], linear(100.0, 0.001), 1).counts == [0, 1]
    assert allot([Offer([0.2, 0.9], 2), Offer([0.5], 1)], linear(100.0, 0.001), 2).counts == [1, 1]


def test_allotting_without_sessions_room_or_costs_is_valid() -> None:
    assert allot([], linear(1.0, 1.0), 8) == Allotment([], 0.0, 1.0)
    assert allot([Offer([0.9], 1)], linear(1.0, 0.0), 0).counts == [0]
    assert allot([Offer([0.9], 0)], linear(1.0, 0.0), 9).counts == [0]
    assert allot([Offer([0.9], 1)], linear(0.0, 0.0), 9).counts == [1], "a curve of zeros divides nothing by zero"


def test_the_guaranteed_share_of_a_group_is_chosen_first_and_the_best_of_the_rest_after_it() -> None:
    poor, good = Offer([0.2, 0.1], 8, 0), Offer([0.9, 0.8, 0.3], 8, 1)

    def counts(least: dict[int, int], room: int = 100) -> list[int]:
        return allot_over([poor, good], lambda sizes: [10.0 + size for size in sizes], room, least=least).counts

    assert counts({}) == [0, 3]
    assert counts({0: 2}) == [2, 3]
    assert counts({0: 1}, room=2) == [1, 1]
    assert counts({0: 2}, room=1) == [1, 0]
    assert counts({0: 9, 1: 9}) == [2, 3]
