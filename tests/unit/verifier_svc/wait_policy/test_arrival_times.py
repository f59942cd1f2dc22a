"""What is believed of a drafter's speed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.wait_policy.arrival_times import EDGES, RENEWED, TRIES, ArrivalTimes, DelayDistribution
from verifier_svc.wait_policy.wait_policy import SAMPLE_WEIGHT, RunningAverage

TIMES = st.floats(0.0, 2.0)


def test_the_first_sample_is_the_average_and_later_ones_move_it_by_their_weight() -> None:
    average = RunningAverage()
    average.add(4.0)
    assert average.value == 4.0
    average.add(9.0)
    assert average.value == pytest.approx(4.0 + SAMPLE_WEIGHT * 5.0)


def test_nothing_is_expected_of_a_drafter_that_never_answered() -> None:
    delays = DelayDistribution()
    assert delays.expected(0.0, 1.0) == []
    for _ in range(100):
        delays.missed(0.01)
    assert delays.expected(0.0, 1.0) == []


def chance(delays: DelayDistribution, passed_s: float, within_s: float) -> float:
    return sum(share for _, share in delays.expected(passed_s, within_s))


def test_a_steady_drafter_is_expected_at_its_time_and_hardly_after_it() -> None:
    delays = DelayDistribution()
    for _ in range(500):
        delays.came(0.010)
    assert chance(delays, 0.0, 0.009) == 0.0
    assert chance(delays, 0.0, 0.011) > 0.95
    assert chance(delays, 0.008, 0.0032) > 0.95
    assert delays.expected(0.012, 1.0) == []


def test_a_wait_that_ended_early_counts_for_as_long_as_it_lasted() -> None:
    """Half of the answers come after 5 ms, half after 30 ms; those are never seen if every wait ends after 20 ms."""
    delays = DelayDistribution()
    for number in range(2000):
        delays.came(0.005) if number % 2 else delays.missed(0.020)
    assert chance(delays, 0.0, 0.006) == pytest.approx(0.5, abs=0.03)
    assert chance(delays, 0.0, 1.0) == pytest.approx(0.5, abs=0.03)
    assert delays.expected(0.007, 1.0) == []


def test_the_chance_of_what_is_late_is_that_among_the_late() -> None:
    """Answers take 2 ms or 50 ms: who has waited 10 ms is told of 50, not of an average."""
    delays, chooser = DelayDistribution(), random.Random(1)
    for _ in range(4000):
        delays.came(0.002 if chooser.random() < 0.8 else 0.050)
    assert chance(delays, 0.0, 0.003) == pytest.approx(0.8, abs=0.1)
    assert chance(delays, 0.010, 0.030) == 0.0
    assert chance(delays, 0.010, 0.046) > 0.9


def test_expected_arrival_times_follow_a_drafter_that_becomes_slower() -> None:
    delays = DelayDistribution()
    for _ in range(2000):
        delays.came(0.002)
    for _ in range(500):
        delays.came(0.020)
    assert chance(delays, 0.0, 0.010) < 0.05
    assert chance(delays, 0.0, 0.030) > 0.9


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TIMES, st.booleans()), max_size=40), TIMES, TIMES)
def test_expectations_are_probabilities_of_moments_to_come(
    samples: list[tuple[float, bool]], passed_s: float, most_s: float
) -> None:
    delays = DelayDistribution()
    for after_s, answered in samples:
        (delays.came if answered else delays.missed)(after_s)
    expected = delays.expected(passed_s, most_s)
    moments = [after for after, _ in expected]
    assert moments == sorted(moments)
    assert all(0.0 < after <= most_s and passed_s + after <= EDGES[-1] * 1.001 for after in moments)
    assert all(share > 0.0 for _, share in expected)
    assert math.fsum(share for _, share in expected) <= 1.0 + 1e-9


def test_a_drafter_with_many_missed_waits_is_expected_again_after_it_answers() -> None:
    delays = DelayDistribution()
    for _ in range(100_000):
        delays.missed(0.02)
    for _ in range(500):
        delays.came(0.003)
    assert chance(delays, 0.0, 0.004) > 0.9


def test_answers_on_request_are_requested_until_they_are_known_and_again_after_many_rounds_without() -> None:
    delays = ArrivalTimes.on_request().first
    for _ in range(TRIES):
        assert delays.unknown
        delays.came(0.002)
    assert not delays.unknown
    for _ in range(RENEWED):
        assert not delays.unknown
        delays.passed_over()
    assert delays.unknown
    delays.missed(0.004)
    assert not delays.unknown
    assert not ArrivalTimes().first.unknown, "others come by themselves"
