"""The waiting patterns that every role needs, each written once: backoff, broadcast, stall watch, token bucket.

Nothing here starts a task or a thread. Clocks are arguments, in monotonic seconds, so tests run on virtual time.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

CHECKS = 6
"""Checks of a peer's progress within the limit of a `StallWatch`."""
JITTER = random.Random()
"""Shortens delays. A generator of its own: a simulation seeds it, and other libraries' threads draw nothing from it."""
_MOST_DOUBLINGS = 32
_TIMER_SLACK_S = 1e-6
"""An event loop's timers may fire early by its clock's resolution."""


class Backoff:
    """Delays between tries of one operation: `first_s`, doubled after every failure, at most `most_s`. Each delay is
    shortened at random by up to a half, so that peers which failed together do not return together."""

    def __init__(self, first_s: float = 0.1, most_s: float = 2.0) -> None:
        self.first_s, self.most_s = first_s, most_s
        self.failures = 0
        """Failed tries since the last success."""

    def reset(self) -> None:
        """The operation succeeded."""
        self.failures = 0

    def next_delay_s(self) -> float:
        """The operation failed: returns the seconds to wait before the next try."""
        delay_s = min(self.most_s, self.first_s * 2.0 ** min(self.failures, _MOST_DOUBLINGS))
        self.failures += 1
        return JITTER.uniform(0.5, 1.0) * delay_s

    async def wait(self) -> None:
        """The operation failed: sleep until the next try."""
        await asyncio.sleep(self.next_delay_s())


class Broadcast:
    """Wakes every task that waits for the next change of some state. The state itself lives elsewhere: a task reads it
    and waits at once, so that no change in between is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next `notify_all`."""
        await self._event.wait()


class StallWatch:
    """Decides when a peer is stuck: no progress for `limit_s`, while this process itself ran.

    A process that stood still (SIGSTOP, a suspended machine, a long collection) could not have received anything, so
    after such a pause the limit begins anew. The owner checks every `check_s` and reports how long each check took.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float], progress_at: float | None = None) -> None:
        self.limit_s = limit_s
        self.check_s = limit_s / CHECKS
        self._clock = clock
        self.progress_at = clock() if progress_at is None else progress_at
        """When the peer last made progress."""
        self.resumed_at = -math.inf
        """When this process last ran on after it had stood still."""

    def note_progress(self) -> None:
        self.progress_at = self._clock()

    def note_check(self, began: float, longest_s: float) -> None:
        """A check that began at `began` has ended. One that took more than `longest_s` shows that this process stood
        still."""
        if self._clock() - began > longest_s:
            self.resumed_at = self._clock()

    def stalled(self, due_since: float | None = None) -> bool:
        """Whether nothing came for `limit_s`, counted from the last progress, or from `due_since` where progress was
        not due before."""
        since = self.progress_at if due_since is None else due_since
        return self._clock() - max(since, self.resumed_at) >= self.limit_s - _TIMER_SLACK_S


class TokenBucket:
    """A rate limit: `capacity` in every `period_s`, as much at once. A capacity of 0 is without limit."""

    __slots__ = ("_at", "_capacity", "_level", "_period_s")

    def __init__(self, capacity: float, period_s: float, now: float) -> None:
        self._capacity = capacity
        self._period_s = period_s
        self._level = float(capacity)
        self._at = now

    def resize(self, capacity: float) -> None:
        """Change the limit; what was used stays used."""
        self._level = min(float(capacity), self._level + max(0.0, capacity - self._capacity))
        self._capacity = capacity

    def fits(self, amount: float) -> bool:
        """Whether the bucket can ever hold `amount`."""
        return not self._capacity or amount <= self._capacity

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken; 0 if it can be taken now."""
        if not self._capacity:
            return 0.0
        self._level = min(self._capacity, self._level + (now - self._at) * self._capacity / self._period_s)
        self._at = now
        return max(0.0, (amount - self._level) * self._period_s / self._capacity)

    def take(self, amount: float) -> None:
        """Take `amount`, for which `wait_s` returned 0 at this time."""
        if self._capacity:
            self._level -= amount

    def drain(self, debt: float = 0.0) -> None:
        """Take all there is, and `debt` more, which is refilled first."""
        self._level = -debt

    def give_back(self, amount: float) -> None:
        """Return what was taken and not used."""
        self._level = min(self._capacity, self._level + amount)
