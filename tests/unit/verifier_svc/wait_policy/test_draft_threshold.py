"""What a candidate must be worth: the levels that drafters are told, and when they are told another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.emulated.model import LinearCost
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.wait_policy.draft_threshold import DEAR, HANDLING_S, LEVELS, PAUSE, SAVED, SLACK, DraftThreshold

RATE = 50.0


def sloped(price: float) -> Callable[[int], float]:
    """Seconds of a step in which one more token costs so many tokens at RATE, handling it included."""
    return lambda tokens: 0.02 + (price / RATE - HANDLING_S) * tokens


def learn(price: DraftThreshold, value: float, times: int = 200) -> int:
    """How often the threshold changed while a place in a step cost that much."""
    return sum(price.observe(RATE, sloped(value), 4) for _ in range(times))


def flat(tokens: int) -> float:
    """A pass that costs the same for any number of tokens."""
    return 0.02


def rate_of(sending: float) -> float:
    """Tokens a second at which sending a candidate costs so much, where passes are flat: p = R h / (SAVED (1 - R h))"""
    return sending * SAVED / (1.0 + sending * SAVED) / HANDLING_S


def send(price: DraftThreshold, value: float, times: int = 200) -> int:
    """How often the threshold changed while sending cost that much."""
    return sum(price.observe(rate_of(value), flat, 4) for _ in range(times))


@given(st.floats(0.0, 2.0))
def test_the_threshold_is_the_highest_level_that_sending_costs(value: float) -> None:
    price = DraftThreshold()
    changed = price.observe(rate_of(value), flat, 4)
    handling = rate_of(value) * HANDLING_S
    assert price.price == pytest.approx(min(handling, PAUSE))
    level = max((level for level in LEVELS if level <= value + 1e-12), default=LEVELS[0])
    assert price.threshold == (PAUSE if handling > DEAR else level)
    assert changed == (level != LEVELS[0])


@given(st.floats(0.0, 2.0))
def test_a_place_in_the_step_that_costs_more_than_any_candidate_brings_pauses_them_all(value: float) -> None:
    price = DraftThreshold()
    price.observe(RATE, sloped(value), 4)
    assert price.price == pytest.approx(min(value, PAUSE), abs=1e-9)
    assert (price.threshold == PAUSE) == (price.price > DEAR)


@pytest.mark.parametrize(("floor", "lowest"), [(0.0, 0.0), (0.04, 0.04), (0.3, 0.3), (PAUSE, PAUSE)])
def test_no_level_is_below_the_floor(floor: float, lowest: float) -> None:
    price = DraftThreshold(floor)
    assert price.threshold == lowest
    assert learn(price, 0.0) == 0 and price.threshold == lowest
    send(price, 0.5)
    assert price.threshold == max(floor, 0.4)
    learn(price, 2.0)
    assert price.threshold == PAUSE


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_level_is_left_only_when_the_price_is_clearly_below_it(level: float) -> None:
    price = DraftThreshold()
    send(price, level * 1.01)
    assert price.threshold == level
    assert send(price, level / SLACK * 1.01) == 0
    assert send(price, level / SLACK * 0.98) >= 1 and price.threshold < level


def test_pausing_ends_by_itself_when_the_load_falls_and_does_not_flap() -> None:
    price = DraftThreshold()
    assert learn(price, DEAR * 1.05) >= 1 and price.threshold == PAUSE
    assert learn(price, DEAR / SLACK * 1.01) == 0
    assert learn(price, DEAR / SLACK * 0.98) == 1 and price.threshold == 0.4


@given(st.sampled_from(LEVELS[1:]), st.lists(st.floats(-0.09, 0.09), min_size=1, max_size=60))
def test_a_price_that_fluctuates_around_a_level_changes_the_threshold_once(level: float, noise: list[float]) -> None:
    price = DraftThreshold()
    send(price, level * 0.9)
    assert sum(price.observe(rate_of(level * (1.0 + share)), flat, 4) for share in noise) <= 1


@pytest.mark.parametrize(("value", "threshold"), [(0.1, 0.02), (0.21, 0.04), (0.4, 0.15), (0.7, 0.4)])
def test_where_a_place_in_the_step_is_costly_a_candidate_must_gain_it_twice(value: float, threshold: float) -> None:
    """Its own place, and that of what is above it."""
    price = DraftThreshold()
    learn(price, value)
    assert price.threshold == threshold


def test_one_outlying_step_does_not_change_the_threshold() -> None:
    price = DraftThreshold()
    learn(price, 0.01)
    assert not price.observe(RATE, sloped(4.0), 4)
    assert price.threshold == LEVELS[0]


def curve_of(cost: LinearCost) -> CostCurve:
    curve = CostCurve()
    for size in BUCKETS:
        curve.record(size, 1, [cost(size, 1)])
    return curve


@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
def test_where_time_is_proportional_to_tokens_no_candidate_pays_and_where_it_is_flat_every_one_does(
    tokens: int,
) -> None:
    """The verifier's own rate at that size without candidates: so many tokens in so much time."""
    for cost, least, most in [(LinearCost(0.0, 0.001), PAUSE, PAUSE), (LinearCost(0.2), LEVELS[0], 0.06)]:
        price, curve = DraftThreshold(), curve_of(cost)
        for _ in range(20):
            price.observe(tokens / cost(tokens, 1), partial(curve.seconds, sessions=1), tokens)
        assert least <= price.threshold <= most


def test_candidates_that_cost_the_pass_nothing_still_cost_the_verifiers_thread() -> None:
    """At thousands of tokens a second the microseconds of reading and grafting a candidate count."""
    for rate, threshold in [(100.0, 0.02), (2000.0, 0.08), (6_000.0, 0.25)]:
        price = DraftThreshold()
        for _ in range(20):
            price.observe(rate, flat, 64)
        assert price.threshold == threshold
