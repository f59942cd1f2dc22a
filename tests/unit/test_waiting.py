"""The waiting rule against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.waiting import Arrival, wait_s

TIMES = st.floats(0.0, 2.0)
ARRIVALS = st.lists(st.builds(Arrival, TIMES, st.floats(0.0, 3.0)), max_size=6)


def rate(tokens: float, step_s: float, arrivals: list[Arrival], wait: float) -> float:
    return (tokens + sum(arrival.gain for arrival in arrivals if arrival.after_s <= wait)) / (wait + step_s)


@settings(max_examples=300, deadline=None)
@given(st.floats(1.0, 20.0), st.floats(0.001, 1.0), ARRIVALS, TIMES)
def test_the_wait_is_the_best_of_all_moments(
    tokens: float, step_s: float, arrivals: list[Arrival], most_s: float
) -> None:
    chosen = wait_s(tokens, step_s, arrivals, most_s)
    moments = [0.0] + [arrival.after_s for arrival in arrivals if arrival.after_s <= most_s]
    assert chosen in moments
    best = max(rate(tokens, step_s, arrivals, moment) for moment in moments)
    assert rate(tokens, step_s, arrivals, chosen) == pytest.approx(best)


@given(ARRIVALS, st.floats(-1.0, 2.0))
def test_no_wait_is_longer_than_allowed(arrivals: list[Arrival], most_s: float) -> None:
    assert wait_s(1.0, 0.1, arrivals, most_s) <= max(0.0, most_s)


@given(st.lists(st.builds(Arrival, TIMES, st.just(0.0)), max_size=4))
def test_nothing_is_waited_for_that_gains_nothing(arrivals: list[Arrival]) -> None:
    assert wait_s(1.0, 0.1, arrivals, 2.0) == 0.0


def test_an_overdue_arrival_does_not_hold_the_step() -> None:
    assert wait_s(1.0, 0.1, [Arrival(0.0, 0.9)], 1.0) == 0.0


def test_the_formula_decides_at_its_threshold() -> None:
    # G * t_v > N * t: a gain of 0.5 in a step of 0.1 s with one token is worth 0.05 s.
    assert wait_s(1.0, 0.1, [Arrival(0.049, 0.5)], 1.0) == 0.049
    assert wait_s(1.0, 0.1, [Arrival(0.051, 0.5)], 1.0) == 0.0


def test_many_sessions_share_the_cost_of_a_wait() -> None:
    assert wait_s(10.0, 0.1, [Arrival(0.04, 0.6)], 1.0) == 0.0
    assert wait_s(10.0, 0.1, [Arrival(0.04, 0.6)] * 10, 1.0) == 0.04


def test_a_step_that_takes_no_time_waits_for_nobody() -> None:
    assert wait_s(1.0, 0.0, [Arrival(0.01, 5.0)], 1.0) == 0.0
