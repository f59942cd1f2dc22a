"""Limits of a remote drafter, which is untrusted: amount and form of the frames that it may send.

Nodes are counted against commands: a drafter earns with every command it is sent, and pays for what it sends from that.
An honest one answers a command with at most a tree of nodes, so it never runs out, however slow it is and however late
its answers come. Distributions are read under a ratio rule only, and of nodes that join the tree only; their entries
are counted too. Frames are counted against time, because each costs the event loop some 80 us whatever is in it: a
drafter sends at most one for each of its steps. Sizes are checked before anything is copied: a message of 4 MiB can
claim a million nodes, and the event loop must not pay for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.concurrency import TokenBucket
from slipstream.errors import PROTOCOL, InvalidArgument
from slipstream.rpc import proto_conversion
from slipstream.speculation import draft_distribution
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.frame import Frame, TreeLimits, check
from slipstream.v1 import types_pb2

AHEAD = 16
"""Nodes that a drafter may be ahead by, for each that a step may take: in verification, after it, and replacements."""
UNITS_PER_NODE = 2
"""A node, and an entry of a frame for itself. Checking a unit takes microseconds."""
ENTRIES_PER_UNIT = 32
"""Entries of distributions that are checked in the time of one unit."""
COMMANDS = 16
"""Commits that a drafter may be behind, and still answer every one of them with a whole tree."""
BYTES = 1024
"""Bytes of a frame that cost the link one unit."""
FRAMES_PER_S = 2000.0
"""Frames a second of one link; as many may come at once. No model and no index takes more steps for long."""


class WorkAllowance:
    """Units of work that one session's drafter, or a whole link, may still cause."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 0

    def earn(self, nodes: int, sessions: int = 1, *, with_distributions: bool = False) -> None:
        """One command was sent to the drafter, which it may answer with `nodes` nodes, each with the longest of
        distributions where its session's rule needs them. What it does not use is saved, up to COMMANDS such commands
        for each of its `sessions`; a command never takes anything away."""
        entries = draft_distribution.MAX_TOKENS // ENTRIES_PER_UNIT if with_distributions else 0
        earned = (UNITS_PER_NODE + entries) * nodes
        self._left = max(self._left, min(COMMANDS * sessions * earned, self._left + earned))

    def spend(self, work: int) -> bool:
        """Whether `work` units are still paid for; once they are not, nothing is left."""
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
        so that a flood is not taken up again at once."""
        if self.wait_s(1, now):
            self.drain(FRAMES_PER_S)
            return False
        self.take(1)
        return True


class ReceivedDistributions:
    """The distributions of a frame's nodes as they came: each is checked when it is read."""

    def __init__(self, received: Sequence[types_pb2.Distribution], vocabulary_size: int) -> None:
        self._received = received
        self._vocabulary_size = vocabulary_size

    def __len__(self) -> int:
        return len(self._received)

    def __getitem__(self, index: int, /) -> DraftDistribution:
        """Raises InvalidArgument for one that no correct drafter sends."""
        received = self._received[index]
        return draft_distribution.checked(received.token_ids, received.weights, self._vocabulary_size)

    @property
    def entries(self) -> int:
        """Tokens and weights of all of them, of which each distribution has as many."""
        return sum(max(len(each.token_ids), len(each.weights)) for each in self._received)


def read_frame(
    candidates: types_pb2.Candidates, source: int, vocabulary_size: int, limits: TreeLimits, *, with_distributions: bool
) -> Frame:
    """Raises InvalidArgument for what no correct drafter sends. `with_distributions`: whether the session's rule needs
    them; they are left unread otherwise."""
    # Every access to a field makes an object: frames of one node come by the thousand.
    token_ids, parents, confidences = candidates.token_ids, candidates.parents, candidates.confidences
    distributions = candidates.distributions
    if max(len(token_ids), len(parents), len(confidences), len(distributions)) > limits.frame_nodes:
        raise InvalidArgument(f"a frame holds more than {limits.frame_nodes} nodes; send fewer.", reason=PROTOCOL)
    read = with_distributions and distributions
    unchecked = Frame(
        base_length=candidates.base_length,
        generation=candidates.generation,
        first_node=candidates.first_node,
        token_ids=tuple(token_ids),
        log_probs=proto_conversion.confidences_from_proto(confidences),
        parents=tuple(parents),
        distributions=ReceivedDistributions(distributions, vocabulary_size) if read else (),
        source=source,
    )
    return check(unchecked, vocabulary_size, limits)


def work_of(frame: Frame) -> int:
    """The units that a frame of a session costs."""
    sent = frame.distributions
    entries = sent.entries if isinstance(sent, ReceivedDistributions) else 0
    return 1 + len(frame.token_ids) + entries // ENTRIES_PER_UNIT
