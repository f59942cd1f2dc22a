"""A sequence: one session's KV rows in one engine. A segment: its part of a packed forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange


@dataclass(slots=True, eq=False)
class KVSequence:
    """Rows 0 .. length-1 hold committed tokens; `ahead` rows after them hold the last forward's, until `keep`."""

    blocks: list[int]
    block_size: int
    salt: str | None = None
    """Sequences of one salt share prefixes; None shares nothing."""
    length: int = 0
    ahead: int = 0
    closed: bool = False
    rolled_back: bool = False
    """Since it grew last: other sequences may read its last block, or the prefix cache may hold its contents."""
    tokens: list[int] = field(default_factory=list)
    """The committed tokens."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of its full blocks (`slipstream.engine.kvcache.prefix_cache`)."""
    _rows: torch.Tensor | None = field(default=None, repr=False)
    _contiguous: bool = True

    def __post_init__(self) -> None:
        self.blocks_changed()

    @property
    def capacity(self) -> int:
        """Tokens, candidates included, that may have rows at the same time."""
        return len(self.blocks) * self.block_size

    @property
    def rows(self) -> torch.Tensor | None:
        """int64 [capacity]: pool row of each slot; None while the blocks are one contiguous run."""
        if self._contiguous:
            return None
        if self._rows is None:
            starts = torch.tensor(self.blocks).unsqueeze(1) * self.block_size
            self._rows = (starts + torch.arange(self.block_size)).flatten()
        return self._rows

    @property
    def first_row(self) -> int:
        """The pool row of slot 0; with contiguous blocks slot s is row `first_row + s`."""
        return self.blocks[0] * self.block_size if self.blocks else 0

    def blocks_changed(self) -> None:
        """Drops what was derived from `blocks`."""
        first = self.blocks[0] if self.blocks else 0
        self._contiguous = self.blocks == list(range(first, first + len(self.blocks)))
        self._rows = None

    def pool_rows(self, start: int, stop: int) -> list[int]:
        """Pool rows of the slots start .. stop-1."""
        if self._contiguous:
            return list(range(self.first_row + start, self.first_row + stop))
        size = self.block_size
        return [self.blocks[slot // size] * size + slot % size for slot in range(start, stop)]


@dataclass(slots=True, eq=False)
class Segment:
    """A session's pending tokens, and a candidate tree rooted at the last of them."""

    sequence: KVSequence
    pending: list[int]
    """Committed tokens without KV yet, at positions sequence.length and up; never empty."""
    nodes: list[int] = field(default_factory=list)
    """Candidate token ids, parents before children."""
    parents: list[int] = field(default_factory=list)
    """-1 is the root (the last pending token), else the index of an earlier node."""
    want_logits: bool = True
    """False for a prefill chunk that does not reach the end of the prompt."""
    wanted: list[int] | None = None
    """Nodes whose logits are wanted, -1 for the last pending token, in the order of the rows; None: that one and all
    nodes."""
    held: int = 0
    """Leading tokens whose rows the sequence's last forward wrote, as part of this tree: they are not computed again.
    Only for engines that need not be batch-invariant."""

    @property
    def tokens(self) -> int:
        """KV rows from the first pending token to the last node."""
        return len(self.pending) + len(self.nodes)

    @property
    def computed(self) -> int:
        """KV rows this segment writes."""
        return self.tokens - self.held

    @property
    def is_chain(self) -> bool:
        """True if each node's parent is the node before it."""
        return self.parents == list(range(-1, len(self.nodes) - 1))

    @property
    def logit_rows(self) -> int:
        return len(self.logit_tokens())

    def logit_tokens(self) -> list[int]:
        """Which of its tokens have a row of logits, in the order of the rows; number 0 is the first one computed."""
        first = len(self.pending) - self.held
        if not self.want_logits:
            return []
        wanted = range(-1, len(self.nodes)) if self.wanted is None else self.wanted
        return [first + node for node in wanted]

    def depths(self) -> list[int]:
        """Positions of pending tokens and nodes, counted from the sequence's length."""
        count = len(self.pending)
        found = list(range(count))
        for parent in self.parents:
            found.append(1 + found[count + parent])
        return found

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
        if self.held and not (self.held < self.tokens and self.held <= sequence.ahead):
            raise FailedPrecondition(f"{self.held} of {self.tokens} rows should be there, {sequence.ahead} are")
        wanted = self.logit_tokens()
        if wanted and not 0 <= min(wanted) <= max(wanted) < self.computed:
            raise InvalidArgument(f"logits of {self.wanted} are wanted, which are not among the tokens computed")
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
