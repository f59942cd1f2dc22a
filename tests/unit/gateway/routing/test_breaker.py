"""A breaker lets one session at a time try a drafter that failed, and never shuts out one that works."""

from __future__ import annotations

import itertools

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.breaker import (
    BURST_S,
    LIMIT,
    PROBE_S,
    BreakerSettings,
    BreakerState,
    CircuitBreaker,
    DrafterBreaker,
    weight,
)
from slipstream.v1 import types_pb2

TOLERANCE = BreakerSettings(window_s=30.0, cool_down_s=1.0, longest_cool_down_s=8.0)
CODES = {code.name: code.value[0] for code in grpc.StatusCode}


def failure(code: str, reason: str = "") -> types_pb2.Failure:
    return types_pb2.Failure(code=CODES[code], message="no", reason=reason)


LIE = failure("INVALID_ARGUMENT", "PROTOCOL")
LOST = failure("UNAVAILABLE", "LINK_LOST")
SILENT = failure("DEADLINE_EXCEEDED", "SILENT")
NAN = failure("INTERNAL", "BROKEN_NUMBERS")
FULL = failure("RESOURCE_EXHAUSTED")


class Owner:
    pass


def tripped() -> CircuitBreaker:
    breaker = CircuitBreaker(TOLERANCE)
    breaker.failed(Owner(), LIE, 0.0)
    return breaker


@pytest.mark.parametrize(
    ("what", "times"),
    [
        (LIE, 1),
        (failure("FAILED_PRECONDITION", "CANDIDATES_AHEAD"), 1),
        (failure("INVALID_ARGUMENT", "DISHONEST"), 1),
        (failure("RESOURCE_EXHAUSTED", "FLOODING"), 1),
        (NAN, 2),
        (SILENT, 2),
        (LOST, 3),
        (failure("INTERNAL", "LINK_LOST"), 3),  # a link that broke for whatever reason is a link that broke
        (FULL, 6),
        (failure("INVALID_ARGUMENT"), 6),  # of the drafter: it refused one session
    ],
)
def test_faults_of_a_drafter_open_its_breaker_sooner_than_lost_links(what: types_pb2.Failure, times: int) -> None:
    breaker = CircuitBreaker(TOLERANCE)
    for number in range(times):
        assert breaker.state(float(number)) is BreakerState.CLOSED
        breaker.failed(Owner(), what, float(number))
    assert breaker.state(float(times - 1)) is BreakerState.OPEN


@pytest.mark.parametrize("what", [LIE, NAN, FULL, failure("INVALID_ARGUMENT")])
def test_failures_in_one_tenant_s_sessions_cost_no_other_tenant_the_drafter(what: types_pb2.Failure) -> None:
    breaker, owner, other = DrafterBreaker(TOLERANCE), Owner(), Owner()
    for number in range(6):
        breaker.failed(owner, what, float(number), "alice")
    assert breaker.state(5.0, "alice") is breaker.state(5.0) is not BreakerState.CLOSED
    assert breaker.state(5.0, "bob") is BreakerState.CLOSED and breaker.admits(other, 5.0, "bob")
    breaker.enter(owner, 100.0, "alice")
    assert breaker.state(100.0, "alice") is BreakerState.HALF_OPEN
    breaker.succeeded(owner, 100.0, "alice")
    assert breaker.state(100.0) is BreakerState.CLOSED


@pytest.mark.parametrize("what", [LOST, SILENT, failure("OUT_OF_RANGE")])
def test_failures_of_a_drafter_s_process_cost_every_tenant_the_drafter(what: types_pb2.Failure) -> None:
    breaker, probe = DrafterBreaker(TOLERANCE), Owner()
    for number in range(3):
        breaker.failed(Owner(), what, float(number), f"tenant {number}")
    assert breaker.state(2.0, "another") is not BreakerState.CLOSED
    assert breaker.admits(probe, 10.0, "another")
    breaker.enter(probe, 10.0, "another")
    assert not breaker.admits(Owner(), 10.0, "tenant 1")
    breaker.leave(probe, "another")
    assert breaker.admits(Owner(), 10.0, "tenant 1")


def test_one_lost_link_reported_by_a_thousand_sessions_is_one_failure() -> None:
    breaker = CircuitBreaker(TOLERANCE)
    for number in range(1000):
        breaker.failed(Owner(), LOST, BURST_S * number / 1001)
    assert breaker.state(BURST_S) is BreakerState.CLOSED


def test_failures_that_are_rare_never_open() -> None:
    breaker = CircuitBreaker(TOLERANCE)
    for number in range(50):  # never three within a window
        breaker.failed(Owner(), LOST, number * TOLERANCE.window_s / 2)
        assert breaker.state(number * TOLERANCE.window_s / 2) is BreakerState.CLOSED


def test_cool_downs_double_up_to_a_bound_and_start_again_after_a_good_time() -> None:
    breaker, owner, now = tripped(), Owner(), 0.0
    cool_downs = [1.0]
    for _ in range(5):
        now += cool_downs[-1]
        assert breaker.state(now) is BreakerState.HALF_OPEN
        breaker.enter(owner, now)
        breaker.failed(owner, FULL, now)
        step = next(s for s in (1.0, 2.0, 4.0, 8.0, 16.0) if breaker.state(now + s) is BreakerState.HALF_OPEN)
        assert breaker.state(now + step - 1e-6) is BreakerState.OPEN
        cool_downs.append(step)
    assert cool_downs == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    for pause, expected in ((TOLERANCE.window_s / 2, 8.0), (TOLERANCE.window_s, 1.0)):
        now += 8.0
        breaker.enter(owner, now)
        breaker.succeeded(owner, now)
        assert breaker.state(now) is BreakerState.CLOSED
        now += pause
        breaker.failed(owner, LIE, now)
        assert breaker.state(now + expected - 1e-6) is BreakerState.OPEN
        assert breaker.state(now + expected) is BreakerState.HALF_OPEN


def test_while_one_session_tries_no_other_one_is_admitted_and_only_its_outcome_counts() -> None:
    breaker, first, second = tripped(), Owner(), Owner()
    assert not breaker.admits(first, 0.5)
    breaker.enter(first, 1.0)
    assert breaker.admits(first, 1.5) and not breaker.admits(second, 1.5)
    breaker.succeeded(second, 1.5)
    breaker.failed(second, LIE, 1.5)
    assert breaker.state(1.5) is BreakerState.HALF_OPEN and breaker.admits(first, 1.5)
    breaker.succeeded(first, 2.0)
    assert breaker.admits(second, 2.0)


def test_a_probing_session_without_an_outcome_does_not_keep_others_out() -> None:
    breaker, first, second = tripped(), Owner(), Owner()
    breaker.enter(first, 1.0)
    assert not breaker.admits(second, 1.0 + PROBE_S - 1e-6)
    assert breaker.admits(second, 1.0 + PROBE_S)
    breaker.enter(second, 20.0)
    breaker.leave(first)  # its try is over already
    assert not breaker.admits(first, 21.0)
    breaker.leave(second)
    assert breaker.admits(first, 21.0)


ACTIONS = ("lie", "lost", "first enters", "second enters", "first delivers", "second delivers", "first leaves", "wait")


@pytest.mark.parametrize("length", [5])
def test_after_any_short_history_a_drafter_can_be_tried_again(length: int) -> None:
    """All of them: 8^5."""
    for story in itertools.product(ACTIONS, repeat=length):
        breaker, owners, now = CircuitBreaker(TOLERANCE), {"first": Owner(), "second": Owner()}, 0.0
        failures = 0
        for action in story:
            now = play(breaker, owners, action, now)
            failures += action in ("lie", "lost")
            if not failures:
                assert breaker.state(now) is BreakerState.CLOSED, story
        assert breaker.admits(Owner(), now + TOLERANCE.longest_cool_down_s + PROBE_S), story


def play(breaker: CircuitBreaker, owners: dict[str, Owner], action: str, now: float) -> float:
    who, _, what = action.partition(" ")
    if action in ("lie", "lost"):
        breaker.failed(owners["first"], LIE if action == "lie" else LOST, now)
    elif action == "wait":
        return now + 1.0
    elif what == "enters" and breaker.admits(owners[who], now):
        breaker.enter(owners[who], now)
    elif what == "delivers":
        breaker.succeeded(owners[who], now)
    elif what == "leaves":
        breaker.leave(owners[who])
    return now + 0.1


class Fleet(RuleBasedStateMachine):
    """Sessions, a drafter that works or does not, a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(TOLERANCE)
        self.now = 0.0
        self.trying: dict[Owner, float] = {}
        """Who was let in while the breaker was not closed, and when."""
        self.members: list[Owner] = []
        self.weights: list[tuple[float, float]] = []

    @rule(seconds=st.sampled_from([0.01, 0.4, 1.0, 7.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def join(self) -> None:
        owner = Owner()
        if self.breaker.admits(owner, self.now):
            if self.breaker.state(self.now) is not BreakerState.CLOSED:
                assert self.breaker.state(self.now) is BreakerState.HALF_OPEN
                self.trying = {o: at for o, at in self.trying.items() if self.now - at < PROBE_S}
                assert not self.trying, "two try at once"
                self.trying[owner] = self.now
            self.breaker.enter(owner, self.now)
            self.members.append(owner)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), what=st.sampled_from([LIE, LOST, SILENT, FULL]))
    def fail(self, data: st.DataObject, what: types_pb2.Failure) -> None:
        owner = data.draw(st.sampled_from(self.members))
        before = self.breaker.state(self.now)
        self.breaker.failed(owner, what, self.now)
        self.weights.append((self.now, weight(what)))
        if self.breaker.state(self.now) is BreakerState.OPEN and before is not BreakerState.OPEN:
            recent = sum(each for at, each in self.weights if self.now - at < TOLERANCE.window_s)
            assert recent >= LIMIT or owner in self.trying, "opened without a reason"
            self.trying.clear()
        self._gone(owner)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.members))
        before = self.breaker.state(self.now)
        self.breaker.succeeded(owner, self.now)
        if before is not BreakerState.CLOSED and self.breaker.state(self.now) is BreakerState.CLOSED:
            assert owner in self.trying
            self.trying.clear()

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.members))
        self.breaker.leave(owner)
        self._gone(owner)

    def _gone(self, owner: Owner) -> None:
        self.breaker.leave(owner)
        self.members.remove(owner)
        self.trying.pop(owner, None)

    @invariant()
    def it_can_be_tried_again_in_the_end(self) -> None:
        assert self.breaker.admits(Owner(), self.now + TOLERANCE.longest_cool_down_s + PROBE_S)

    @invariant()
    def without_failures_it_is_closed(self) -> None:
        if not self.weights:
            assert self.breaker.state(self.now) is BreakerState.CLOSED


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFleet = Fleet.TestCase
