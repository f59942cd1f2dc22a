"""The waiting rule against brute force: the best of all moments, and the best long-run rate of all policies."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.wait_policy.wait_time import Awaited, wait_s

TIMES = st.floats(0.0, 2.0)


@dataclass(frozen=True)
class Arrival:
    """One answer whose time is known."""

    after_s: float
    gain: float


def wait_for(rate: float, arrivals: list[Arrival], most_s: float) -> float:
    return wait_s(rate, [Awaited(arrival.gain, [(arrival.after_s, 1.0)]) for arrival in arrivals], most_s)


ARRIVALS = st.lists(st.builds(Arrival, TIMES, st.floats(0.0, 3.0)), max_size=6)
EVER = 1e9


def profit(rate: float, arrivals: list[Arrival], wait: float) -> float:
    """Tokens won by what arrives within the wait, less those that are committed in as much time."""
    return sum(arrival.gain for arrival in arrivals if arrival.after_s <= wait) - rate * wait


@settings(max_examples=300, deadline=None)
@given(rate=st.floats(0.0, 50.0), arrivals=ARRIVALS, most_s=st.floats(-1.0, 2.0))
def test_the_wait_is_the_best_of_all_moments(rate: float, arrivals: list[Arrival], most_s: float) -> None:
    chosen = wait_for(rate, arrivals, most_s)
    moments = [0.0] + [arrival.after_s for arrival in arrivals if arrival.after_s <= most_s]
    assert chosen in moments
    best = max(profit(rate, arrivals, moment) for moment in moments)
    assert profit(rate, arrivals, chosen) == pytest.approx(best)
    assert not chosen or profit(rate, arrivals, chosen) > 0.0


@given(st.lists(st.builds(Arrival, TIMES, st.just(0.0)), max_size=4), st.floats(0.0, 10.0))
def test_a_wait_without_gain_is_zero(arrivals: list[Arrival], rate: float) -> None:
    assert wait_for(rate, arrivals, 2.0) == 0.0


@given(ARRIVALS, st.floats(0.1, 10.0), st.floats(1.0, 4.0))
def test_a_faster_verifier_never_waits_longer(arrivals: list[Arrival], rate: float, faster: float) -> None:
    assert wait_for(rate * faster, arrivals, 2.0) <= wait_for(rate, arrivals, 2.0)


def test_the_wait_ends_exactly_where_the_gain_equals_its_cost() -> None:
    # 10 tokens a second: a gain of 0.5 is worth 0.05 s, whatever the step itself would commit.
    assert wait_for(10.0, [Arrival(0.049, 0.5)], 1.0) == 0.049
    assert wait_for(10.0, [Arrival(0.051, 0.5)], 1.0) == 0.0


def test_a_chain_is_waited_for_where_its_first_token_alone_would_not_pay() -> None:
    chain = [Arrival(0.06 + 0.01 * place, 0.5) for place in range(4)]
    assert wait_for(10.0, chain[:1], 1.0) == 0.0
    assert wait_for(10.0, chain, 1.0) == pytest.approx(0.09)


def test_many_sessions_share_the_cost_of_a_wait() -> None:
    assert wait_for(100.0, [Arrival(0.04, 0.6)], 1.0) == 0.0
    assert wait_for(100.0, [Arrival(0.04, 0.6)] * 10, 1.0) == 0.04


# Answers whose time is not known.

CHANCES = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.05, 0.3)), min_size=1, max_size=3).map(sorted)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.1, 20.0), st.lists(st.builds(Awaited, st.floats(0.1, 3.0), CHANCES, st.integers(1, 2)), max_size=2))
def test_the_wait_is_the_best_over_all_that_may_happen(rate: float, awaited: list[Awaited]) -> None:
    """Every outcome is enumerated: which answer comes when, or never; the wait ends when all have come."""
    single = [(each.gain / each.count, each.chances) for each in awaited for _ in range(each.count)]
    outcomes = [[*chances, (math.inf, 1.0 - sum(chance for _, chance in chances))] for _, chances in single]

    def expected(wait: float) -> float:
        total = 0.0
        for outcome in itertools.product(*outcomes):
            gain = sum(single[i][0] for i, (after, _) in enumerate(outcome) if after <= wait)
            ended = min(wait, max(after for after, _ in outcome))
            total += math.prod(chance for _, chance in outcome) * (gain - rate * ended)
        return total

    moments = [0.0] + [after for each in awaited for after, _ in each.chances]
    best = max(map(expected, moments)) if awaited else 0.0
    assert expected(wait_s(rate, awaited, 1.0)) == pytest.approx(best, abs=1e-9) if awaited else not best


# The long run. A round is in one of some states; each says what a step commits that starts at once, how long it takes,
# and what arrives when. A policy gives every state a wait; rounds follow each other independently of it.


@dataclass(frozen=True)
class State:
    weight: float
    tokens: float
    step_s: float
    arrivals: list[Arrival]

    @property
    def moments(self) -> list[float]:
        """Between arrivals there is nothing to wait for."""
        return sorted({0.0, *(arrival.after_s for arrival in self.arrivals)})


STATES = st.lists(
    st.builds(
        State,
        st.floats(0.1, 1.0),
        st.floats(1.0, 5.0),
        st.floats(0.05, 1.0),
        st.lists(st.builds(Arrival, st.floats(0.0, 1.0), st.floats(0.0, 2.0)), max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def long_run(states: list[State], waits: tuple[float, ...]) -> float:
    """Tokens a second (renewal-reward: the ratio of the means of a round)."""
    pairs = list(zip(states, waits, strict=True))
    tokens = sum(state.weight * (state.tokens + profit(0.0, state.arrivals, wait)) for state, wait in pairs)
    return tokens / sum(state.weight * (state.step_s + wait) for state, wait in pairs)


def by_rule(states: list[State], rate: float) -> tuple[float, ...]:
    return tuple(wait_for(rate, state.arrivals, EVER) for state in states)


def best_of_all(states: list[State]) -> float:
    return max(long_run(states, waits) for waits in itertools.product(*(state.moments for state in states)))


@settings(max_examples=200, deadline=None)
@given(STATES, st.floats(0.1, 200.0))
def test_the_rule_that_takes_its_own_rate_finds_the_best_of_all_policies(states: list[State], rate: float) -> None:
    """All policies are tried, among them every threshold. From whatever rate it starts, a verifier that waits by the
    rate which it measures comes to rest, and nowhere but at the best policy."""
    for _ in range(100):
        measured = long_run(states, by_rule(states, rate))
        if measured == pytest.approx(rate, rel=1e-12):
            break
        rate = measured
    else:
        pytest.fail("the rate does not settle")
    assert rate == pytest.approx(best_of_all(states), rel=1e-9)


def test_maximising_each_step_alone_is_not_the_best_policy() -> None:
    """What the rule replaced: after a miss a plain step of one token seems to lose little by waiting long."""
    states = [State(0.5, 4.0, 0.02, []), State(0.5, 1.0, 0.02, [Arrival(0.018, 1.0)])]

    def alone(state: State, wait: float) -> float:
        return (state.tokens + profit(0.0, state.arrivals, wait)) / (state.step_s + wait)

    myopic = tuple(max(state.moments, key=lambda wait: alone(state, wait)) for state in states)
    assert myopic == (0.0, 0.018)
    best = best_of_all(states)
    assert by_rule(states, best) == (0.0, 0.0)
    assert long_run(states, myopic) < 0.9 * best
