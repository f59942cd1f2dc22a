"""How much work a drafter may cause.

Nodes are counted against commands: a drafter earns with everything that it is told, and what it sends is paid from
that. An honest one answers a command with at most a tree of nodes, so it never runs out, however slow it is and
however late its answers come. Frames are counted against time, for one costs the event loop some 80 us whatever is in
it: a drafter sends at most one for each of its steps.
"""

from __future__ import annotations

from slipstream.concurrency import TokenBucket

AHEAD = 16
"""Nodes that a drafter may be ahead by, for each that a step may take: in verification, after it, and replacements."""
UNITS_PER_NODE = 2
"""A node, and an entry of a frame for itself. Checking a unit takes microseconds."""
COMMANDS = 16
"""So many commits a drafter may be behind, and still answer every one of them with a whole tree."""
BYTES = 1024
"""Of a frame make a unit of the link's."""
FRAMES_PER_S = 2000.0
"""Of one link; as many may come at once. No model and no index takes more steps than that for long."""


class WorkAllowance:
    """Of one session's drafter, or of a whole link."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 0

    def earn(self, nodes: int, sessions: int = 1) -> None:
        """One command was said to the drafter, which it may answer with so many nodes. What it does not use is saved,
        up to the worth of COMMANDS such commands for each of its `sessions`; a command never takes anything away."""
        earned = UNITS_PER_NODE * nodes
        self._left = max(self._left, min(COMMANDS * sessions * earned, self._left + earned))

    def spend(self, work: int) -> bool:
        """Whether that much work is still paid for; once it is not, nothing is left."""
        paid = work <= self._left
        self._left = self._left - work if paid else 0
        return paid


class FrameRate(TokenBucket):
    """The rate limit of a link's frames; times are monotonic seconds."""

    __slots__ = ()

    def __init__(self, now: float) -> None:
        super().__init__(FRAMES_PER_S, 1.0, now)

    def admit(self, now: float) -> bool:
        """Whether one more frame is within the rate. One above it costs all that was left and a second's worth more,
        so a flood is not admitted again at once."""
        if self.wait_s(1, now):
            self.drain(FRAMES_PER_S)
            return False
        self.take(1)
        return True
