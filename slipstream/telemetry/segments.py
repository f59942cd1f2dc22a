"""Which rounds of a traced session get spans of their own, and the sums over all others.

A request of 500 rounds would be 2,500 spans, too many to read. So the rounds of SEGMENT_TOKENS committed tokens, a
segment, share one span in each process, with sums; and of each segment the rounds that stand out have spans as well.
The verifier chooses them, by its clock and its outcomes alone, and sends its choice to the other processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slipstream.v1 import types_pb2

SEGMENT_TOKENS = 256
"""Committed tokens of a segment, counted from the beginning of the prompt."""
MOST_SLOW = 4
"""Slow rounds of one segment that have spans of their own."""
SLOW_FACTOR = 3.0
"""A round is slow if it took so many times as long as the mean of those before it,"""
LEAST_SLOW_S = 0.02
"""and at least this long,"""
SLOW_S = 1.0
"""or this long whatever the others took."""

Reason = types_pb2.RoundReason
REASONS = {
    types_pb2.ROUND_REASON_FIRST: "first",
    types_pb2.ROUND_REASON_SLOW: "slow",
    types_pb2.ROUND_REASON_MISSED: "missed",
    types_pb2.ROUND_REASON_REJECTED: "rejected",
    types_pb2.ROUND_REASON_FAILED: "failed",
    types_pb2.ROUND_REASON_ASKED: "asked",
}
"""Values of the attribute `slipstream.reason`."""


@dataclass(slots=True)
class SlowRounds:
    """Finds durations that stand out from those before them."""

    count: int = 0
    total_s: float = 0.0

    def judge(self, seconds: float) -> bool:
        """True for a slow duration. The duration counts in the mean by which later ones are judged."""
        mean_s = self.total_s / self.count if self.count else seconds
        self.count += 1
        self.total_s += seconds
        return seconds >= SLOW_S or seconds >= max(LEAST_SLOW_S, SLOW_FACTOR * mean_s)


@dataclass(slots=True)
class RoundChooser:
    """Chooses rounds of one opening of a session, which come in their order."""

    segment_tokens: int
    """0: every round is chosen."""
    _segment: int = -1
    _slow: SlowRounds = field(default_factory=SlowRounds)
    _chosen: Counter[tuple[Reason, int]] = field(default_factory=Counter)
    """Rounds of the segment that were chosen, by reason and by the cause of a miss."""

    def choose(self, length: int, seconds: float, miss: int, *, rejected: bool) -> Reason:
        """The reason for spans of this round's own; UNSPECIFIED for none.

        `length`: committed tokens before it. `miss`: the cause of a miss, 0 for none. `rejected`: candidates were
        verified and all of them rejected.
        """
        if not self.segment_tokens:
            return types_pb2.ROUND_REASON_ASKED
        first, segment = self._segment < 0, length // self.segment_tokens
        if segment != self._segment:
            self._segment = segment
            self._chosen.clear()
        slow = self._slow.judge(seconds)
        if first:
            return types_pb2.ROUND_REASON_FIRST
        if slow and self._take(types_pb2.ROUND_REASON_SLOW, 0, MOST_SLOW):
            return types_pb2.ROUND_REASON_SLOW
        if miss and self._take(types_pb2.ROUND_REASON_MISSED, miss, 1):
            return types_pb2.ROUND_REASON_MISSED
        if rejected and self._take(types_pb2.ROUND_REASON_REJECTED, 0, 1):
            return types_pb2.ROUND_REASON_REJECTED
        return types_pb2.ROUND_REASON_UNSPECIFIED

    def _take(self, reason: Reason, cause: int, most: int) -> bool:
        self._chosen[reason, cause] += 1
        return self._chosen[reason, cause] <= most
