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

EDGES = tuple(0.00025 * 1.1**power for power in range(88))
"""Seconds at which the bins end, 0.25 ms to 1 s; nothing is waited for that long."""
KEEP = 1.0 - 1.0 / 128
"""What one more observation leaves of the weight of those before it."""
DOUBT = 1.0
"""Observations of nothing that each bin begins with."""
TICK_S = 0.00005
"""The rest of a bin shorter than this is over."""
MOST_WEIGHT = 1e6
HOPELESS = 0.02
"""Where no more than this share of answers is still to come, none is."""


def delay_bin(passed_s: float) -> int:
    """The bin that is waited in."""
    return bisect_right(EDGES, passed_s + TICK_S)


class DelayDistribution:
    """Of one kind of answer."""

    def __init__(self) -> None:
        self._came, self._missed = [0.0] * len(EDGES), [0.0] * len(EDGES)
        self._weight = 1.0
        """Of the next observation. It grows, which is to say that those before it fade."""
        self._outstanding: list[float] | None = None

    def came(self, after_s: float) -> None:
        """An answer came after so many seconds."""
        self._count(self._came, after_s)

    def missed(self, after_s: float) -> None:
        """None had come after so many seconds, when it was not awaited any more."""
        self._count(self._missed, after_s)

    def expected(self, passed_s: float, most_s: float) -> list[tuple[float, float]]:
        """Of an answer awaited for `passed_s` already: (seconds from now, probability that it comes in the bin that
        ends then), for the next `most_s` seconds."""
        outstanding = self._survival()
        bin_ = delay_bin(passed_s)
        before = whole = outstanding[bin_ - 1] if bin_ else 1.0
        expected: list[tuple[float, float]] = []
        while bin_ < len(EDGES) and EDGES[bin_] - passed_s <= most_s and before > HOPELESS:
            after = outstanding[bin_]
            if after < before:
                expected.append((EDGES[bin_] - passed_s, (before - after) / whole))
            before = after
            bin_ += 1
        return expected

    def _count(self, ends: list[float], after_s: float) -> None:
        ends[min(bisect_right(EDGES, after_s), len(EDGES) - 1)] += self._weight
        self._weight /= KEEP
        self._outstanding = None
        if self._weight > MOST_WEIGHT:
            self._normalise()

    def _survival(self) -> list[float]:
        """Share of answers that are still to come when each bin ends."""
        if self._outstanding is None:
            self._outstanding = self._estimate()
        return self._outstanding

    def _normalise(self) -> None:
        """The same evidence, in units of the next observation."""
        self._came = [count / self._weight for count in self._came]
        self._missed = [count / self._weight for count in self._missed]
        self._weight = 1.0

    def _estimate(self) -> list[float]:
        self._normalise()
        came, missed = np.array(self._came), np.array(self._missed)
        # Awaited in a bin was all that ended there with an answer, or later anyhow.
        later = np.cumsum((came + missed)[::-1])[::-1] - missed
        survival: list[float] = np.cumprod(1.0 - came / (later + DOUBT)).tolist()
        return survival


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """Of one drafter, over all its sessions."""

    first: DelayDistribution = field(default_factory=DelayDistribution)
    """From a commit that left the drafter's tree (or an open) to the first candidates on the new root."""
    few: DelayDistribution = field(default_factory=DelayDistribution)
    """From a frame, or a commit that stayed inside the tree, to the next frame, while the session has fewer candidates
    than a step may take: the drafter is filling the tree up."""
    enough: DelayDistribution = field(default_factory=DelayDistribution)
    """The same with more: often it has nothing worth telling."""
