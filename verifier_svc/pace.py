"""How long a drafter takes to answer, so that the waiting rule knows what it waits for.

A drafter's delays have a wide distribution: it may be idle or in the middle of a pass for other sessions. An average
would promise too much of those that are late. So the chance to come is learned per bin of time, as a hazard, from all
that was awaited: what came counts in its bin, and what had not come when it was not awaited any more counts for the
bins it outlasted (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

WEIGHT = 0.2
"""Of a new measurement in each average."""
EDGES = tuple(0.00025 * 1.1**power for power in range(88))
"""Seconds at which the bins end, 0.25 ms to 1 s; nothing is waited for that long."""
KEEP = 1.0 - 1.0 / 128
"""What one more observation leaves of the weight of those before it."""
DOUBT = 1.0
"""Observations of nothing that each bin begins with."""
TICK_S = 0.00005
"""The rest of a bin shorter than this is over: timers are no finer."""
HOPELESS = 0.02
"""Where no more than this share of answers is still to come, none is."""


@dataclass(slots=True)
class Average:
    """Exponentially weighted; None before the first measurement."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + WEIGHT * (sample - self.value)


class Delays:
    """Of one kind of answer."""

    def __init__(self) -> None:
        self._awaited, self._came = np.zeros(len(EDGES)), np.zeros(len(EDGES))
        self._outstanding: list[float] | None = None

    def came(self, after_s: float) -> None:
        """An answer came after so many seconds."""
        bin_ = self._outlasted(after_s)
        if bin_ < len(EDGES):
            self._awaited[bin_] += 1.0
            self._came[bin_] += 1.0

    def missed(self, after_s: float) -> None:
        """None had come after so many seconds, when it was not awaited any more."""
        self._outlasted(after_s)

    def expected(self, passed_s: float, most_s: float) -> list[tuple[float, float]]:
        """Of an answer awaited for `passed_s` already: (seconds from now, probability that it comes in the bin that
        ends then), for the next `most_s` seconds."""
        outstanding = self._survival()
        bin_ = bisect_right(EDGES, passed_s + TICK_S)
        before = whole = outstanding[bin_ - 1] if bin_ else 1.0
        expected: list[tuple[float, float]] = []
        while bin_ < len(EDGES) and EDGES[bin_] - passed_s <= most_s and before > HOPELESS:
            after = outstanding[bin_]
            if after < before:
                expected.append((EDGES[bin_] - passed_s, (before - after) / whole))
            before = after
            bin_ += 1
        return expected

    def _outlasted(self, after_s: float) -> int:
        """Counts the bins before the one of this moment, which is returned."""
        bin_ = bisect_right(EDGES, after_s)
        self._awaited *= KEEP
        self._came *= KEEP
        self._awaited[:bin_] += 1.0
        self._outstanding = None
        return bin_

    def _survival(self) -> list[float]:
        """Share of answers that are still to come when each bin ends."""
        if self._outstanding is None:
            hazards = self._came / (self._awaited + DOUBT)
            self._outstanding = np.cumprod(1.0 - hazards).tolist()
        return self._outstanding


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one drafter, over all its sessions."""

    first: Delays = field(default_factory=Delays)
    """From a commit that left the drafter's tree (or an open) to the first candidates on the new root."""
    between: Delays = field(default_factory=Delays)
    """From one frame of candidates to the next."""
