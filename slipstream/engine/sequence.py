"""A sequence: one session's KV rows in one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True, eq=False)
class Sequence:
    """Rows 0 .. length-1 hold committed tokens; `ahead` rows after them hold the last forward's, until `keep`."""

    blocks: list[int]
    block_size: int
    capacity: int
    """Tokens, candidates included, that may have rows at the same time."""
    length: int = 0
    ahead: int = 0
    closed: bool = False
    salt: int = 0
    """The first token; only the emulated engine reads it."""
    rows: torch.Tensor | None = field(default=None, repr=False)
    """int64 [capacity]: pool row of each slot; None while the blocks are one contiguous run."""

    def __post_init__(self) -> None:
        first = self.blocks[0] if self.blocks else 0
        if self.blocks != list(range(first, first + len(self.blocks))):
            starts = torch.tensor(self.blocks).unsqueeze(1) * self.block_size
            self.rows = (starts + torch.arange(self.block_size)).flatten()

    @property
    def first_row(self) -> int:
        """The pool row of slot 0; with contiguous blocks slot s is row `first_row + s`."""
        return self.blocks[0] * self.block_size

    def pool_rows(self, start: int, stop: int) -> list[int]:
        """Pool rows of the slots start .. stop-1."""
        if self.rows is None:
            return list(range(self.first_row + start, self.first_row + stop))
        size = self.block_size
        return [self.blocks[slot // size] * size + slot % size for slot in range(start, stop)]
