"""One session's part of a packed forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.kvcache.sequence import Sequence
from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange


@dataclass(slots=True, eq=False)
class Segment:
    """A session's pending tokens, and a candidate tree rooted at the last of them."""

    sequence: Sequence
    pending: list[int]
    """Committed tokens without KV yet, at positions sequence.length and up; never empty."""
    nodes: list[int] = field(default_factory=list)
    """Candidate token ids, parents before children."""
    parents: list[int] = field(default_factory=list)
    """-1 is the root (the last pending token), else the index of an earlier node."""
    want_logits: bool = True
    """False for a prefill chunk that does not reach the end of the prompt."""

    @property
    def tokens(self) -> int:
        """KV rows this segment writes."""
        return len(self.pending) + len(self.nodes)

    @property
    def logit_rows(self) -> int:
        return 1 + len(self.nodes) if self.want_logits else 0

    def check(self) -> None:
        """Raises FailedPrecondition (closed), InvalidArgument (nothing pending, no tree), OutOfRange (no room)."""
        sequence = self.sequence
        if sequence.closed:
            raise FailedPrecondition("the sequence is closed; open a new one")
        if not self.pending:
            raise InvalidArgument("a segment needs at least one pending token: the root of its candidates")
        if len(self.parents) != len(self.nodes):
            raise InvalidArgument(f"{len(self.nodes)} nodes came with {len(self.parents)} parents")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise InvalidArgument("a node's parent must be -1 or an earlier node")
        if sequence.length + self.tokens > sequence.capacity:
            raise OutOfRange(
                f"{self.tokens} more tokens after {sequence.length} do not fit the {sequence.capacity} reserved ones"
            )

    def is_path(self, path: list[int]) -> bool:
        """True if `path` leads from the root child by child."""
        above = -1
        for node in path:
            if not 0 <= node < len(self.nodes) or self.parents[node] != above:
                return False
            above = node
        return True
