"""Simulated time: what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Events in order of time; those of one moment in the order in which they were put down."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, event))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """To that time, or until `done` after an event."""
        while self._events and self._events[0][0] <= until and not done():
            self.now, _, event = heapq.heappop(self._events)
            event()
