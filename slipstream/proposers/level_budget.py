"""Number of levels of a tree that one call of a proposer goes down.

A level of a small draft model takes less time than handing it over and asking for the next one, so several come
together. A level of a large one is handed over at once: a verifier may be waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import SlipstreamError
from slipstream.proposers.base import Proposal

MOST_LEVELS = 3
WEIGHT = 0.1
"""Weight of a call in the running average."""


class LevelBudget:
    def __init__(self, call_s: float) -> None:
        """`call_s`: seconds that a call of several levels may take, a fraction of any verifier's step."""
        self._call_s = call_s
        self._level_s: float | None = None

    @property
    def levels(self) -> int:
        """Levels of the next call; one before any was timed."""
        if self._level_s is None:
            return 1
        return MOST_LEVELS if self._level_s * MOST_LEVELS <= self._call_s else max(1, int(self._call_s / self._level_s))

    @property
    def level_s(self) -> float:
        """Seconds of a level lately; 0 before any was timed."""
        return self._level_s or 0.0

    def observe(self, seconds: float, answers: Iterable[Proposal | SlipstreamError]) -> None:
        """Records a call that read no prompt."""
        levels = max((answer.levels for answer in answers if isinstance(answer, Proposal)), default=0)
        if levels:
            level_s = seconds / levels
            self._level_s = level_s if self._level_s is None else self._level_s + WEIGHT * (level_s - self._level_s)
