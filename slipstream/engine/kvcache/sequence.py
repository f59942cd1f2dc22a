"""A sequence: one session's KV rows in one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch


@dataclass(slots=True, eq=False)
class Sequence:
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
    _table: npt.NDArray[np.int32] | None = field(default=None, repr=False)
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
    def table(self) -> npt.NDArray[np.int32]:
        """int32 [blocks]: the same numbers as `blocks`, for the device."""
        if self._table is None:
            self._table = np.array(self.blocks, np.int32)
        return self._table

    @property
    def first_row(self) -> int:
        """The pool row of slot 0; with contiguous blocks slot s is row `first_row + s`."""
        return self.blocks[0] * self.block_size if self.blocks else 0

    def blocks_changed(self) -> None:
        """Drops what was derived from `blocks`."""
        first = self.blocks[0] if self.blocks else 0
        self._contiguous = self.blocks == list(range(first, first + len(self.blocks)))
        self._rows = self._table = None

    def pool_rows(self, start: int, stop: int) -> list[int]:
        """Pool rows of the slots start .. stop-1."""
        if self._contiguous:
            return list(range(self.first_row + start, self.first_row + stop))
        size = self.block_size
        return [self.blocks[slot // size] * size + slot % size for slot in range(start, stop)]
