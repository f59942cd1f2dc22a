"""What a candidate must be worth: the levels that drafters are told, and when they are told another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.emulated import LinearCost
from verifier_svc.curve import BUCKETS, CostCurve
from verifier_svc.price import DEAR, HANDLING_S, LEVELS, PAUSE, SLACK, Price

RATE = 50.0


def sloped(price: float) -> Callable[[int], float]:
    """Seconds of a step in which one more token costs so many tokens at RATE, handling it included."""
    return lambda tokens: 0.02 + (price / RATE - HANDLING_S) * tokens


def learn(price: Price, value: float, times: int = 200) -> int:
    """How often the threshold changed while steps cost that much."""
    return sum(price.observe(RATE, sloped(value), 4) for _ in range(times))


@given(st.floats(0.0, 2.0))
def test_the_threshold_is_the_highest_level_that_the_price_reaches(value: float) -> None:
    price = Price()
    changed = price.observe(RATE, sloped(value), 4)
    level = PAUSE if price.average > DEAR else max((level for level in LEVELS if level <= price.average), default=0.04)
    assert price.average == pytest.approx(value, abs=1e-9)
    assert price.threshold == level
    assert changed == (level != LEVELS[0])


@pytest.mark.parametrize(("floor", "lowest"), [(0.0, 0.0), (0.04, 0.04), (0.3, 0.3), (PAUSE, PAUSE)])
def test_no_level_is_below_the_floor(floor: float, lowest: float) -> None:
    price = Price(floor)
    assert price.threshold == lowest
    assert learn(price, 0.0) == 0 and price.threshold == lowest
    learn(price, 0.5)
    assert price.threshold == max(floor, 0.4)
    learn(price, 2.0)
    assert price.threshold == PAUSE


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_level_is_left_only_when_the_price_is_clearly_below_it(level: float) -> None:
    price = Price()
    learn(price, level * 1.01)
    assert price.threshold == level
    assert learn(price, level / SLACK * 1.01) == 0
    assert learn(price, level / SLACK * 0.98) == 1 and price.threshold < level


def test_pausing_ends_by_itself_when_the_load_falls_and_does_not_flap() -> None:
    price = Price()
    assert learn(price, DEAR * 1.05) >= 1 and price.threshold == PAUSE
    assert learn(price, DEAR / SLACK * 1.01) == 0
    assert learn(price, DEAR / SLACK * 0.98) == 1 and price.threshold == LEVELS[-1]


@given(st.sampled_from([*LEVELS[1:], DEAR]), st.lists(st.floats(-0.09, 0.09), min_size=1, max_size=60))
def test_a_price_that_trembles_around_a_level_is_told_once(level: float, noise: list[float]) -> None:
    price = Price()
    learn(price, level * 0.9)
    assert sum(price.observe(RATE, sloped(level * (1.0 + share)), 4) for share in noise) <= 1


def test_one_odd_step_changes_nothing() -> None:
    price = Price()
    learn(price, 0.01)
    assert not price.observe(RATE, sloped(0.3), 4)
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
    for cost, threshold in [(LinearCost(0.0, 0.001), PAUSE), (LinearCost(0.2), LEVELS[0])]:
        price = Price()
        for _ in range(20):
            price.observe(tokens / cost(tokens, 1), curve_of(cost).of(1), tokens)
        assert price.threshold == threshold


def test_what_costs_the_pass_nothing_still_costs_the_verifier_s_thread() -> None:
    """At thousands of tokens a second the microseconds of reading and grafting a candidate count."""
    for rate, threshold in [(100.0, 0.04), (4000.0, 0.08), (12_000.0, 0.25)]:
        price = Price()
        for _ in range(20):
            price.observe(rate, lambda tokens: 0.02, 64)
        assert price.threshold == threshold
