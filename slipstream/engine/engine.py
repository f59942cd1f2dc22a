"""The engine: what drafter and verifier ask of a model. `PackedEngine` runs one, `EmulatedEngine` pretends to.

The life of a step; the forward pass belongs to the model's own thread, the rest is bookkeeping and may be done by
whoever knows that no pass is running:

    engine.grow(sequence, tokens)           # KV for what the step writes
    logits = engine.forward(segments)       # rows for pending tokens and candidate nodes, nothing committed yet
    for segment, path in ...:
        engine.keep(segment, path)          # the accepted nodes become part of the sequence, the others vanish
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

import torch

from slipstream.engine.kvcache.sequence import Sequence
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.segment import Segment


class Engine(Protocol):
    model: ModelInfo

    @property
    def block_size(self) -> int: ...

    @property
    def blocks_total(self) -> int: ...

    @property
    def blocks_free(self) -> int: ...

    def open(self, capacity: int) -> Sequence:
        """Reserves KV for `capacity` tokens, the most candidates of one step included; it shares nothing with others.

        Raises ResourceExhausted when the pool has no room now, OutOfRange for less than one token.
        """
        ...

    def begin(self, token_ids: Tokens[int], salt: str) -> Sequence:
        """A sequence that starts with as much of `token_ids` as is known under this salt: whole blocks, the last token
        never. It reserves nothing; `grow` does."""
        ...

    def missing(self, sequence: Sequence, count: int) -> int:
        """Free blocks that it takes to write `count` more tokens."""
        ...

    def grow(self, sequence: Sequence, count: int) -> None:
        """Room to write `count` more tokens. Raises ResourceExhausted, changing nothing, when too few blocks are
        free."""
        ...

    def forward(self, segments: list[Segment]) -> torch.Tensor:
        """One packed pass. Returns fp32 [rows, vocabulary]: per segment that wants logits, in order, the row of its
        last pending token, then one row per node. Lengths do not advance; call `keep` for each segment to go on.
        A segment that is not kept is simply forgotten: its next forward writes over the rows.

        Raises InvalidArgument for a malformed segment, OutOfRange beyond the reserved capacity or, for
        committed tokens, the model's maximum length. Nodes beyond that length get rows that mean nothing. An error
        leaves every sequence as it was.
        """
        ...

    def keep(self, segment: Segment, path: list[int]) -> None:
        """Commits the pending tokens and the nodes of `path` (indices into nodes, root first) of the last forward.

        Raises InvalidArgument if the path is not one of the tree's, FailedPrecondition without a forward before.
        """
        ...

    def owned(self, sequence: Sequence) -> int:
        """Blocks that are free at least once the sequence is closed."""
        ...

    def disown(self, sequence: Sequence) -> None:
        """What the sequence holds is broken: nobody finds it any more."""
        ...

    def rollback(self, sequence: Sequence, length: int) -> None:
        """Forgets everything from slot `length` on; a sequence that began gives its blocks behind back, so it must grow
        again. Raises OutOfRange for a length the sequence does not have."""
        ...

    def close(self, sequence: Sequence) -> None:
        """Gives the blocks back; closing twice is harmless."""
        ...
