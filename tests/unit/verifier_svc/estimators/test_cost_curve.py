"""The cost curve: sane without measurements, true with them, unmoved by accidents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.estimators.calibration import non_decreasing
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.scheduling.budget import Offer, allot

STEPS = [1, 2, 3, 4, 6, 8, 12, 16, 31, 32, 33, 64, 100, 128, 300, 512, 700, 2048]
observations = st.tuples(st.integers(1, 700), st.integers(1, 80), st.floats(1e-6, 1e3))


def rises(curve: CostCurve, sessions: int) -> bool:
    times = [curve.seconds(tokens, sessions) for tokens in range(1, 900)]
    return times[0] > 0 and all(low <= high for low, high in pairwise(times))


def truth(tokens: int, sessions: int) -> float:
    return 0.030 + 0.0004 * tokens + 0.0001 * sessions


# The nearest non-decreasing sequence.


def test_isotonic_pools_what_contradicts() -> None:
    assert non_decreasing([1, 3, 2, 4], [1, 1, 1, 1]) == [1, 2.5, 2.5, 4]
    assert non_decreasing([1, 3, 2, 4], [1, 3, 1, 1]) == [1, 2.75, 2.75, 4]
    assert non_decreasing([3, 2, 1], [1, 1, 1]) == [2, 2, 2]
    assert non_decreasing([], []) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0.1, 5)), min_size=1, max_size=8))
def test_isotonic_is_the_least_squares_fit(points: list[tuple[float, float]]) -> None:
    """By the min-max formula: x[i] = max over a <= i of min over b >= i of the weighted mean of a .. b."""
    values, weights = np.array(points).T
    size = len(values)

    def mean(start: int, stop: int) -> float:
        return float(np.average(values[start:stop], weights=weights[start:stop]))

    expected = [
        max(min(mean(start, stop) for stop in range(index + 1, size + 1)) for start in range(index + 1))
        for index in range(size)
    ]
    assert non_decreasing(values.tolist(), weights.tolist()) == pytest.approx(expected, abs=1e-9)


# The curve.


def test_before_any_measurement_a_step_is_mostly_fixed_cost() -> None:
    curve = CostCurve()
    assert rises(curve, 1) and rises(curve, 32)
    assert curve.seconds(8, 1) < 1.2 * curve.seconds(1, 1)
    assert curve.seconds(512, 1) > 4 * curve.seconds(1, 1)
    assert curve.seconds(1024, 1) == pytest.approx(2 * curve.seconds(512, 1))


def test_where_candidates_are_free_each_of_them_pays() -> None:
    """`VERIFIER_ALWAYS_SPECULATE`, on a machine where none pays."""
    for free, taken in ((False, 0), (True, 4)):
        curve = CostCurve(free_candidates=free)
        for tokens in (1, 2, 4, 8):
            curve.record(tokens, 1, [float(tokens)])
        assert allot([Offer([0.4, 0.2, 0.1, 0.01], 8)], curve.over(1), 8).counts == [taken]
        assert (curve.seconds(5, 1) == curve.seconds(1, 1)) == free


@settings(max_examples=60, deadline=None)
@given(st.lists(observations, max_size=40))
def test_the_cost_of_a_step_never_falls_with_more_tokens(samples: list[tuple[int, int, float]]) -> None:
    curve = CostCurve()
    for tokens, sessions, seconds in samples:
        curve.observe(tokens, sessions, seconds)
    assert rises(curve, 1) and rises(curve, 5) and rises(curve, 2000)
    for sizes in (range(9), range(500, 600), range(700, 710), range(3, 3)):
        assert curve.over(5)(sizes) == [curve.seconds(tokens, 5) for tokens in sizes]


def test_it_converges_to_what_is_measured() -> None:
    curve, random = CostCurve(), np.random.default_rng(1)
    for _ in range(4000):
        sessions = 2 ** int(random.integers(0, 6))
        tokens = sessions + int(random.integers(0, 200))
        curve.observe(tokens, sessions, truth(tokens, sessions) * float(random.uniform(0.95, 1.05)))
    for tokens, sessions in [(1, 1), (10, 1), (40, 32), (64, 8), (100, 4), (150, 16), (200, 2)]:
        assert curve.seconds(tokens, sessions) == pytest.approx(truth(tokens, sessions), rel=0.06)


def test_between_measured_buckets_it_interpolates() -> None:
    curve = CostCurve()
    for tokens in (8, 16, 64):
        curve.record(tokens, 1, [truth(tokens, 1)] * 3)
    for tokens in (8, 10, 12, 14, 16, 24, 32, 40, 64):
        assert curve.seconds(tokens, 1) == pytest.approx(truth(tokens, 1), rel=0.07)


def test_beyond_what_was_measured_it_goes_on_in_a_line() -> None:
    """A slow machine measured up to 32 tokens, in proportion from 10 on; a fast one found no difference."""
    slow, fast = CostCurve(), CostCurve()
    for tokens in (1, 2, 4, 8, 12, 16, 24, 32):
        slow.record(tokens, 1, [max(0.03, 0.003 * tokens)] * 3)
        fast.record(tokens, 1, [0.01] * 3)
    for tokens in (48, 64, 200, 256, 512):
        assert slow.seconds(tokens, 1) == pytest.approx(0.003 * tokens, rel=0.05)
        assert slow.seconds(tokens, 40) == pytest.approx(0.003 * tokens, rel=0.05)
    assert fast.seconds(512, 1) < 0.07
    slow.observe(64, 1, 0.1)
    assert slow.seconds(64, 1) < 0.15, "what is measured counts"


def test_a_row_without_measurements_borrows_the_shape_of_the_nearest() -> None:
    """Flat up to 64 tokens at 8 sessions; at 16 only plain decoding was ever seen, at twice the price."""
    curve = CostCurve()
    for tokens in BUCKETS:
        curve.record(tokens, 8, [0.01 if tokens <= 64 else 0.01 * tokens / 64] * 3)
    curve.record(16, 16, [0.02] * 3)
    assert curve.seconds(64, 16) == pytest.approx(0.02)
    assert curve.seconds(128, 16) == pytest.approx(0.04)
    assert curve.seconds(64, 4) == pytest.approx(0.01)


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_preempted_steps_hardly_move_it(share: float) -> None:
    curve, random = CostCurve(), np.random.default_rng(2)
    curve.record(8, 1, [0.030] * 3)
    for _ in range(2000):
        slow = 50.0 if random.random() < share else 1.0
        curve.observe(8, 1, 0.030 * slow * float(random.uniform(0.97, 1.03)))
    assert curve.seconds(8, 1) == pytest.approx(0.030, rel=0.10)


def test_one_preempted_step_moves_a_settled_bucket_by_two_percent() -> None:
    curve = CostCurve()
    for _ in range(20):
        curve.observe(8, 1, 0.030)
    curve.observe(8, 1, 1.5)
    assert 0.030 < curve.seconds(8, 1) < 0.030 * 1.025


def test_a_new_bucket_whose_first_step_was_preempted_is_not_written_off() -> None:
    curve = CostCurve()
    for tokens in (1, 2, 4):
        curve.record(tokens, 1, [0.030] * 3)
    curve.observe(16, 1, 3.0)
    assert curve.seconds(16, 1) <= 1.25 * 1.25 * 0.030


def test_a_very_first_step_that_was_preempted_is_forgotten_quickly() -> None:
    curve = CostCurve()
    curve.observe(1, 1, 1.5)
    for _ in range(35):
        curve.observe(1, 1, 0.030)
    assert curve.seconds(1, 1) == pytest.approx(0.030, rel=0.10)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_curve_follows_a_machine_whose_speed_changed(factor: float) -> None:
    curve = CostCurve()
    for _ in range(50):
        curve.observe(8, 1, 0.030)
    for _ in range(60):
        curve.observe(8, 1, 0.030 * factor)
    assert curve.seconds(8, 1) == pytest.approx(0.030 * factor, rel=0.10)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_measurements_are_not_learned(nonsense: float) -> None:
    curve, fresh = CostCurve(), CostCurve()
    curve.observe(4, 1, nonsense)
    curve.record(4, 1, [nonsense] * 3)
    assert [curve.seconds(n, 1) for n in STEPS] == [fresh.seconds(n, 1) for n in STEPS]
