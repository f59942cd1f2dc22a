"""The engine: what drafter and verifier ask of a model. `PackedEngine` runs one, `EmulatedEngine` pretends to.

The life of a step, all on the model's own thread:

    logits = engine.forward(segments)       # rows for pending tokens and candidate nodes, nothing committed yet
    for segment, path in ...:
        engine.keep(segment, path)          # the accepted nodes become part of the sequence, the others vanish
"""

from __future__ import annotations

from typing import Protocol

import torch

from slipstream.engine.model import ModelInfo
from slipstream.engine.sequence import Sequence
from slipstream.engine.step import Segment


class Engine(Protocol):
    model: ModelInfo

    @property
    def block_size(self) -> int: ...

    @property
    def blocks_total(self) -> int: ...

    @property
    def blocks_free(self) -> int: ...

    def open(self, capacity: int) -> Sequence:
        """Reserves KV for `capacity` tokens, the most candidates of one step included.

        Raises ResourceExhausted when the pool has no room now, OutOfRange for less than one token.
        """
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

    def rollback(self, sequence: Sequence, length: int) -> None:
        """Forgets everything from slot `length` on. Raises OutOfRange for a length the sequence does not have."""
        ...

    def close(self, sequence: Sequence) -> None:
        """Gives the blocks back; closing twice is harmless."""
        ...
