"""Stop strings: the text ends before the first of them, wherever tokens and deltas happen to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """Text that became final, and the stop string that ended it."""

    text: str
    stop: str = ""


class StopStrings:
    """Holds back the end of the text while it may be the beginning of a stop string.

    The stop string that is complete first wins, of several the longest: a rule that does not depend on how the text
    arrived, so the same text ends at the same place whatever was drafted.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopScan:
        held = self._held + text
        # The first occurrence of a string is also the one that ends first.
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return StopScan(held[:start], stop)
        keep = max((_beginning(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return StopScan(held[: len(held) - keep])

    def flush(self) -> str:
        """What was held back, once no more text can follow."""
        held, self._held = self._held, ""
        return held


def _beginning(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
