"""Intervals of paired ratios, against scipy's Student's t, and how often they hold the truth."""

from __future__ import annotations

import math
import random

import pytest
import scipy

from measurement.load.paired import paired_ratio, student


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 101])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_student_is_exact(freedom: int, confidence: float) -> None:
    assert student(freedom, confidence) == pytest.approx(scipy.stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-9)


def test_a_ratio_of_pairs_by_hand() -> None:
    found = paired_ratio([10.0, 10.0], [20.0, 5.0])
    assert found is not None and found.value == pytest.approx(1.0)  # twice as fast and half as fast
    half = scipy.stats.t.ppf(0.975, 1) * math.log(2.0) * math.sqrt(2.0) / math.sqrt(2.0)
    assert (found.low, found.high) == pytest.approx((math.exp(-half), math.exp(half)))


def test_drift_between_pairs_cancels_in_their_ratio() -> None:
    machine = [1.0, 0.3, 2.0, 0.7]  # speed of the machine while each pair ran
    found = paired_ratio([10.0 * speed for speed in machine], [13.0 * speed for speed in machine])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.3, 1.3, 1.3))


def test_one_pair_has_no_interval_and_no_pair_no_ratio() -> None:
    single = paired_ratio([2.0], [3.0])
    assert single is not None and (single.value, single.low, single.high) == (pytest.approx(1.5), None, None)
    assert paired_ratio([], []) is None
    assert paired_ratio([1.0, 0.0], [1.0, 1.0]) is None


def test_95_percent_intervals_hold_the_truth_in_95_percent_of_experiments() -> None:
    chance, held = random.Random(1), 0
    for _ in range(2000):
        before = [math.exp(chance.gauss(0.0, 0.5)) for _ in range(4)]
        found = paired_ratio(before, [1.2 * old * math.exp(chance.gauss(0.0, 0.1)) for old in before])
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 1.2 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)
