"""Intervals hold the truth as often as they say: by enumeration where that is possible, by simulation where not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from measurement.experiments.estimates import (
    Interval,
    Numbers,
    apart,
    between,
    mean,
    of_ratio,
    paired,
    quantile,
    ratio,
    student,
)

RUNS = 1000
ACCIDENT = 4 * math.sqrt(0.05 * 0.95 / RUNS)
"""A share of 0.95 of so many runs is off by more than this once in some ten thousand tries."""


def sessions(chance: np.random.Generator, size: int, rate: float) -> tuple[Numbers, Numbers]:
    """Accepted and drafted of each: sessions differ in length and in how easy their text is."""
    drafted = chance.geometric(1 / 60, size).astype(float)
    ease = chance.beta(8 * rate, 8 * (1 - rate), size)
    return chance.binomial(drafted.astype(int), ease).astype(float), drafted


def times(chance: np.random.Generator, size: int) -> Numbers:
    return chance.lognormal(0.0, 0.8, size)


def coverage(draw: Callable[[np.random.Generator], Interval], truth: float) -> float:
    chance = np.random.default_rng(7)
    intervals = [draw(chance) for _ in range(RUNS)]
    return sum(each.low <= truth <= each.high for each in intervals) / RUNS


@pytest.mark.parametrize("size", [25, 200])
def test_a_ratio_s_interval_holds_it_although_rounds_of_a_session_resemble_each_other(size: int) -> None:
    held = coverage(lambda chance: of_ratio(ratio(*sessions(chance, size, 0.6))), 0.6)
    assert held == pytest.approx(0.95, abs=ACCIDENT + 0.02)  # the delta method is a little short for few sessions


def test_counting_rounds_as_independent_gives_intervals_that_are_too_narrow() -> None:
    """Why sessions are what is drawn: the textbook interval of a share holds it in half of the cases."""

    def naive(chance: np.random.Generator) -> Interval:
        accepted, drafted = sessions(chance, 200, 0.6)
        rate = accepted.sum() / drafted.sum()
        half = 1.96 * math.sqrt(rate * (1 - rate) / drafted.sum())
        return Interval(rate, rate - half, rate + half)

    assert coverage(naive, 0.6) < 0.6


@pytest.mark.parametrize("sizes", [(30, 30), (20, 300)])
def test_two_arms_that_are_alike_are_called_different_once_in_twenty_times(sizes: tuple[int, int]) -> None:
    def difference(chance: np.random.Generator) -> Interval:
        first, second = (ratio(*sessions(chance, size, 0.6)) for size in sizes)
        return apart(first, second)

    assert coverage(difference, 0.0) == pytest.approx(0.95, abs=ACCIDENT + 0.02)


def test_a_difference_of_quantiles_holds_the_true_one() -> None:
    def difference(chance: np.random.Generator) -> Interval:
        return between(quantile(times(chance, 150), 0.5), quantile(1.5 * times(chance, 90), 0.5))

    assert 0.95 - ACCIDENT <= coverage(difference, 0.5) <= 0.99


@pytest.mark.parametrize("share", [0.5, 0.95])
@pytest.mark.parametrize("size", [6, 60, 73, 500, 5000])
def test_a_quantile_lies_in_its_interval_with_the_binomial_probability(size: int, share: float) -> None:
    """Exactly, whatever the distribution: the values are their own ranks here."""
    interval = quantile(np.arange(1, size + 1, dtype=float), share)
    low = 0 if math.isinf(interval.low) else int(interval.low)
    high = size + 1 if math.isinf(interval.high) else int(interval.high)
    below = scipy.stats.binom(size, share)
    assert below.cdf(high - 1) - below.cdf(low - 1) >= 0.95
    for narrower in ((low + 1, high), (low, high - 1)):  # no shorter one leaves either side its half of the doubt
        assert max(below.cdf(narrower[0] - 1), below.sf(narrower[1] - 1)) > 0.025
    assert interval.value == math.ceil(share * size)


def test_the_interval_of_a_difference_combines_the_facing_ends_of_both_intervals() -> None:
    """Its low end from how low the second and how high the first may be: 3 and 4 make 5."""
    found = between(Interval(10.0, 9.0, 14.0), Interval(20.0, 17.0, 21.0))
    assert found == (10.0, 5.0, pytest.approx(10.0 + math.sqrt(2.0)))


def test_few_sessions_give_no_bounds_for_rare_values() -> None:
    assert quantile(np.arange(50.0), 0.95).high == math.inf
    assert not of_ratio(mean(np.arange(9.0))).known and of_ratio(mean(np.arange(10.0))).known
    assert math.isnan(quantile([], 0.5).value) and math.isnan(ratio(np.zeros(20), np.zeros(20)).value)
    assert not between(quantile(np.arange(50.0), 0.95), quantile(np.arange(500.0), 0.95)).known


@settings(max_examples=50, deadline=None)
@given(npst.arrays(float, 12, elements=st.floats(0, 1e3)), npst.arrays(float, 12, elements=st.floats(0.1, 1e3)))
def test_a_ratio_is_the_sum_over_the_sum_and_its_sessions_move_it_to_nothing(top: Numbers, bottom: Numbers) -> None:
    found = ratio(top, bottom)
    assert found.value == pytest.approx(top.sum() / bottom.sum())
    assert found.moves.sum() == pytest.approx(0.0, abs=1e-6 * (1.0 + found.value) * len(top))


def test_the_same_sessions_are_compared_pair_by_pair() -> None:
    """What makes a session easy makes it so for both, and cancels."""
    chance = np.random.default_rng(3)
    ease = chance.uniform(0.0, 10.0, 50)
    first, second = mean(ease), mean(ease + chance.normal(0.3, 0.1, 50))
    close, wide = paired(first, second), apart(first, second)
    assert close.value == wide.value and close.low > 0.0 > wide.low
    assert paired(first, ratio(np.zeros(50), np.zeros(50))).known is False


@pytest.mark.parametrize("freedom", [8, 9.5, 30, 1e6])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_student_s_t(freedom: float, confidence: float) -> None:
    assert student(freedom, confidence) == pytest.approx(scipy.stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-3)
