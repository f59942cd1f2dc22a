"""Measured distributions of how long a drafter takes to answer; the wait policy computes its waits from them.

A drafter's delays vary widely: it may be idle, or in the middle of a pass for other sessions. An average would make
late answers look likelier than they are. So the chance of an answer is estimated per bin of time, as a hazard: one that
came counts in its bin, and one that was no longer awaited before it came counts for the bins it outlasted (Kaplan and
Meier, "Nonparametric estimation from incomplete observations", 1958).

A head inside the verifier is of use for the present root alone, and beside a pass it takes several times as long as
without. So it proposes only while a step is held back for it, and how long it takes is seen only then: its
distributions are *on request*. A step is held back for one of which too little is known, and again after many rounds in
which it did not pay.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

EDGES = tuple(0.00025 * 1.1**power for power in range(88))
"""Seconds at which the bins end, 0.25 ms to 1 s, which is longer than any wait."""
KEEP = 1.0 - 1.0 / 128
"""Factor by which each observation reduces the weight of those before it."""
DOUBT = 1.0
"""Missed answers that each bin begins with."""
TICK_S = 0.00005
"""A rest of a bin shorter than this counts as over."""
MOST_WEIGHT = 1e6
TRIES = 16
"""Requests after which the delays of answers are known: the first ones are slow."""
RENEWED = 256
"""Rounds without a request after which one is made to see whether it pays by now."""
HOPELESS = 0.02
"""When no more than this share of answers is outstanding, none is expected."""


def delay_bin(passed_s: float) -> int:
    """Index of the bin for an answer that has been awaited for `passed_s` seconds."""
    return bisect_right(EDGES, passed_s + TICK_S)


class DelayDistribution:
    """Delays of one kind of answer."""

    def __init__(self, *, on_request: bool = False) -> None:
        self._on_request = on_request
        self._requests = 0
        """Requests that were answered, or whose answer did not come in time."""
        self._passed_over = 0
        """Rounds since the last one in which none was made."""
        self._came, self._missed = [0.0] * len(EDGES), [0.0] * len(EDGES)
        self._weight = 1.0
        """Weight of the next observation. It grows, so that older ones fade."""
        self._outstanding: list[float] | None = None

    def came(self, after_s: float) -> None:
        """Counts an answer that came after `after_s` seconds."""
        self._count(self._came, after_s)

    @property
    def unknown(self) -> bool:
        """Whether an answer should be requested to see how long it takes."""
        return self._on_request and (self._requests < TRIES or self._passed_over >= RENEWED)

    def passed_over(self) -> None:
        """Counts a round without a request."""
        self._passed_over += 1

    def missed(self, after_s: float) -> None:
        """Counts an answer that had not come after `after_s` seconds, when it was no longer awaited."""
        self._count(self._missed, after_s)

    def expected(self, passed_s: float, most_s: float) -> list[tuple[float, float]]:
        """Pairs (seconds from now at which a bin ends, probability that the answer comes in that bin) for the next
        `most_s` seconds, of an answer that has been awaited for `passed_s` seconds."""
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
        self._requests, self._passed_over = self._requests + 1, 0
        ends[min(bisect_right(EDGES, after_s), len(EDGES) - 1)] += self._weight
        self._weight /= KEEP
        self._outstanding = None
        if self._weight > MOST_WEIGHT:
            self._normalise()

    def _survival(self) -> list[float]:
        """Share of answers that are outstanding when each bin ends."""
        if self._outstanding is None:
            self._normalise()
            came, missed = np.array(self._came), np.array(self._missed)
            # Awaited in a bin: all that came or were given up there or later, less those given up there.
            awaited = np.cumsum((came + missed)[::-1])[::-1] - missed
            self._outstanding = np.cumprod(1.0 - came / (awaited + DOUBT)).tolist()
        return self._outstanding

    def _normalise(self) -> None:
        """Divides all weights by that of the next observation."""
        self._came = [count / self._weight for count in self._came]
        self._missed = [count / self._weight for count in self._missed]
        self._weight = 1.0


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """Delay distributions of one drafter, over all its sessions."""

    first: DelayDistribution = field(default_factory=DelayDistribution)
    """From an open, or a commit outside the drafter's tree, to the first candidates on the new root."""
    few: DelayDistribution = field(default_factory=DelayDistribution)
    """From a frame, or a commit inside the tree, to the next frame, while the session has fewer candidates than a step
    may take: the drafter is filling the tree up."""
    enough: DelayDistribution = field(default_factory=DelayDistribution)
    """As `few`, while the session has enough candidates: the drafter often has nothing worth sending."""

    @classmethod
    def on_request(cls) -> ArrivalTimes:
        """Delays of a source that proposes only while a step is held back for it, from when that began."""
        delays = DelayDistribution(on_request=True)
        return cls(delays, delays, delays)
