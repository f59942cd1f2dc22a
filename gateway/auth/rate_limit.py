"""A token bucket: so much a minute, at most a minute's worth at once."""

from __future__ import annotations

MINUTE_S = 60.0


class TokenBucket:
    """`per_minute` 0 is without limit. Times are monotonic seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def resize(self, per_minute: int) -> None:
        """The limit changed; what was used stays used."""
        self._left = min(float(per_minute), self._left + max(0, per_minute - self._per_minute))
        self._per_minute = per_minute

    def fits(self, amount: int) -> bool:
        """Whether so much could ever be taken."""
        return not self._per_minute or amount <= self._per_minute

    def wait(self, amount: int, now: float) -> float:
        """Seconds until so much can be taken; 0: now."""
        if not self._per_minute:
            return 0.0
        self._left = min(float(self._per_minute), self._left + (now - self._at) * self._per_minute / MINUTE_S)
        self._at = now
        return max(0.0, (amount - self._left) * MINUTE_S / self._per_minute)

    def take(self, amount: int) -> None:
        """Only after `wait` said 0 at this time."""
        if self._per_minute:
            self._left -= amount

    def give_back(self, amount: int) -> None:
        """What was taken and not used."""
        self._left = min(float(self._per_minute), self._left + amount)
