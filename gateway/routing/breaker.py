"""Circuit breakers of each drafter: while one is open, no session of its tenants uses the drafter. Pure; time is an
argument, in monotonic seconds.

    closed ──── failures within the window weigh LIMIT or more ───▶ open
    open ────── the cool-down is over ────────────────────────────▶ half-open
    half-open ─ the one probing session got candidates ───────────▶ closed
    half-open ─ it failed again ──────────────────────────────────▶ open, twice as long up to a bound

Half-open is a matter of time, not an event: the next session may probe the drafter. A probe that is never decided (the
session ended, or had nothing to draft) passes to the next session, at the latest after PROBE_S, so no breaker stays
open for ever.

What is wrong with a drafter's process or links opens one breaker, which is every tenant's. What it sent for a session
may be for what that session's client asked: it opens the breaker of its tenant, and no other tenant loses the drafter.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from slipstream.errors import LINK_LOST
from slipstream.tenants import PerTenant
from slipstream.v1 import types_pb2

LIMIT = 3.0
"""Weight of recent failures that opens a breaker."""
BURST_S = 0.5
"""Seconds within which failures of one kind count as one: every session of a lost link reports it."""
PROBE_S = 10.0
"""Seconds after which an undecided probe does not block another one."""

# Reasons that verifiers send for what no correct drafter does.
_AT_ONCE = frozenset({"PROTOCOL", "CANDIDATES_AHEAD", "DISHONEST", "FLOODING"})
_SERIOUS = frozenset({grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.DEADLINE_EXCEEDED.value[0]})
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.OUT_OF_RANGE.value[0]})


def weight(failure: types_pb2.Failure) -> float:
    """The weight of a DrafterEvent's failure against the drafter itself.

    Broken numbers and silence weigh two thirds of LIMIT, a lost link a third. A refusal weighs a sixth: most often the
    drafter is only full, or cannot hold this one session.
    """
    if failure.reason in _AT_ONCE:
        return LIMIT
    if _is_lost(failure):
        return 1.0
    return 2.0 if failure.code in _SERIOUS else 0.5


def _is_lost(failure: types_pb2.Failure) -> bool:
    return failure.reason == LINK_LOST or failure.code in _AWAY


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Times of a breaker, in seconds."""

    window_s: float = 30.0
    """Older failures are forgotten; a breaker that stayed closed for so long starts from the first cool-down again."""
    cool_down_s: float = 1.0
    longest_cool_down_s: float = 60.0


class BreakerState(enum.Enum):
    """From best to worst."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


_SEVERITY = {state: number for number, state in enumerate(BreakerState)}


class CircuitBreaker:
    """One breaker. An owner is a session that would use it: compared by identity, otherwise unused."""

    def __init__(self, tolerance: BreakerSettings | None = None) -> None:
        self._tolerance = tolerance or BreakerSettings()
        self._failures: list[tuple[float, str, float]] = []
        """Time, kind and weight of each failure within the window."""
        self._until: float | None = None
        """When the cool-down ends; None while closed."""
        self._cool_down_s = 0.0
        self._closed_at = -math.inf
        self._probe: object | None = None
        self._probe_until = 0.0

    def state(self, now: float) -> BreakerState:
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def admits(self, owner: object, now: float) -> bool:
        """Whether the owner may use the drafter, or go on using it."""
        if self._until is None or self._probe is owner:
            return True
        return now >= self._until and (self._probe is None or now >= self._probe_until)

    def enter(self, owner: object, now: float) -> None:
        """An admitted owner starts to use the drafter: while half-open, this is the one probe."""
        if self._until is not None and self._probe is not owner:
            self._probe, self._probe_until = owner, now + PROBE_S

    def leave(self, owner: object) -> None:
        """The owner stopped using the drafter; if it was the probe, the probe is undecided."""
        if self._probe is owner:
            self._probe = None

    def succeeded(self, owner: object, now: float) -> None:
        """Candidates of the drafter were verified for the owner; closes the breaker if it is the probe."""
        if self._until is not None and self._probe is owner:
            self._until = self._probe = None
            self._closed_at = now
            self._failures.clear()

    def failed(self, owner: object, failure: types_pb2.Failure, now: float) -> None:
        """The drafter failed the owner. While open only the probe counts: other failures are older than the
        cool-down."""
        if self._until is not None:
            if self._probe is owner:
                self._trip(now, again=True)
            return
        kind = f"{failure.code}/{failure.reason}"
        self._failures = [old for old in self._failures if now - old[0] < self._tolerance.window_s]
        if any(kind == known and now - then < BURST_S for then, known, _ in self._failures):
            return
        self._failures.append((now, kind, weight(failure)))
        if sum(each for _, _, each in self._failures) >= LIMIT:
            self._trip(now, again=now - self._closed_at < self._tolerance.window_s)

    def _trip(self, now: float, *, again: bool) -> None:
        doubled = 2.0 * self._cool_down_s if again else 0.0
        self._cool_down_s = min(self._tolerance.longest_cool_down_s, max(self._tolerance.cool_down_s, doubled))
        self._until, self._probe = now + self._cool_down_s, None
        self._failures.clear()


class DrafterBreaker:
    """The breakers of one drafter, for a session of a tenant as one: `CircuitBreaker` says what is asked."""

    def __init__(self, tolerance: BreakerSettings | None = None) -> None:
        self._shared = CircuitBreaker(tolerance)
        self._own = PerTenant(lambda: CircuitBreaker(tolerance))

    def state(self, now: float, tenant: str | None = None) -> BreakerState:
        """The state for a tenant's sessions; None: the worst of all tenants'."""
        own: Iterable[CircuitBreaker] = self._own if tenant is None else (self._own[tenant],)
        return max([each.state(now) for each in (self._shared, *own)], key=_SEVERITY.__getitem__)

    def admits(self, owner: object, now: float, tenant: str = "") -> bool:
        return all(each.admits(owner, now) for each in self._of(tenant))

    def enter(self, owner: object, now: float, tenant: str = "") -> None:
        for each in self._of(tenant):
            each.enter(owner, now)

    def leave(self, owner: object, tenant: str = "") -> None:
        for each in self._of(tenant):
            each.leave(owner)

    def succeeded(self, owner: object, now: float, tenant: str = "") -> None:
        for each in self._of(tenant):
            each.succeeded(owner, now)

    def failed(self, owner: object, failure: types_pb2.Failure, now: float, tenant: str = "") -> None:
        of_process = _is_lost(failure) or failure.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        (self._shared if of_process else self._own[tenant]).failed(owner, failure, now)

    def _of(self, tenant: str) -> tuple[CircuitBreaker, CircuitBreaker]:
        return self._shared, self._own[tenant]
