"""How fast a drafter answers, so that the waiting rule knows what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2
"""Of a new measurement in each average."""
PATIENCE = 3.0
"""Candidates this many times later than usual are no longer believed in."""
LATE = 0.25
"""Of the usual time, that candidates which are due or late are still expected to take: nothing comes to the second."""


@dataclass(slots=True)
class Average:
    """Exponentially weighted; None before the first measurement."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + WEIGHT * (sample - self.value)


@dataclass(slots=True)
class Pace:
    """Of one drafter, over all its sessions. Seconds on the monotonic clock."""

    first: Average
    """From a commit that left the drafter's tree (or an open) to the first candidate on the new root."""
    between: Average
    """From one candidate of a chain to the next."""

    def expected_s(self, now: float, since: float, fresh: bool) -> float | None:
        """Seconds until the next candidates; None when they are not to be waited for.

        `since` is when the session was asked (`fresh`), or when its last candidate came.
        """
        usual = (self.first if fresh else self.between).value
        if usual is None:
            return None
        passed = now - since
        return max(LATE * usual, usual - passed) if passed < PATIENCE * usual else None
