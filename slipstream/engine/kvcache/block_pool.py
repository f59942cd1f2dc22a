"""The block pool: which KV rows belong to whom. Only the books; the rows themselves live in
`slipstream.engine.kvcache.store`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slipstream.errors import Internal, ResourceExhausted

KEPT_SHARE = 0.5
"""Of the pool may be free blocks that are kept for what is in them: the rest stays blank, so that new sessions find
contiguous runs."""


class BlockPool:
    """Reference-counted blocks of `block_size` rows each. Always: blocks free + blocks in use == total.

    A free block may be *kept*: what is in it may be wanted again (`slipstream.engine.kvcache.prefix_cache`), so it is
    given away after all blank ones, the one that was released first before the others.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of at least one row, not {total} of {block_size}")
        self.total = total
        self.block_size = block_size
        self.lost: Callable[[int], None] = lambda block: None
        """Told of each kept block that is given away for something else."""
        self._counts = np.zeros(total, np.int32)
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._is_kept = np.zeros(total, bool)
        self._free = total

    @classmethod
    def holding(cls, tokens: int, block_size: int) -> BlockPool:
        """As many whole blocks as `tokens` rows fill. Raises ResourceExhausted when they do not fill one."""
        if tokens < block_size:
            raise ResourceExhausted(f"KV for {tokens} tokens is less than one block of {block_size}; give more memory.")
        return cls(tokens // block_size, block_size)

    @property
    def free(self) -> int:
        """Blocks without references, kept ones included."""
        return self._free

    @property
    def kept(self) -> int:
        return len(self._kept)

    def count(self, block: int) -> int:
        """References on the block."""
        return int(self._counts[block])

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks with one reference each, those right behind block `after` if they are blank, else from the
        middle of the widest blank run, where both neighbours have room to grow: a session whose rows are contiguous is
        read without a copy. Raises ResourceExhausted, taking nothing, when fewer are free."""
        if count > self._free:
            raise ResourceExhausted(
                f"{count} KV blocks are needed, {self._free} of {self.total} are free; try later or with fewer tokens.",
                reason="KV_EXHAUSTED",
            )
        if count == 0:
            return []
        blocks = self._behind(after, count) or self._run(count) or self._scattered(count)
        self._counts[blocks] = 1
        self._free -= count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference on blocks that are in use or kept."""
        for block in blocks:
            if self._counts[block] == 0:
                if not self._is_kept[block]:
                    raise Internal("a free KV block cannot be shared")
                self._unkeep(block)
                self._free -= 1
            self._counts[block] += 1

    def release(self, blocks: list[int], keep: Callable[[int], bool] = lambda block: False) -> None:
        """One reference less. A block without references is free again, and kept if `keep` says so."""
        for block in blocks:
            if self._counts[block] == 0:
                raise Internal(f"KV block {block} was released more often than taken")
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free += 1
                if keep(block):
                    self._kept[block] = None
                    self._is_kept[block] = True
        while len(self._kept) > self.total * KEPT_SHARE:
            self._lose(next(iter(self._kept)))

    def _blank(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Of the blocks start .. stop-1 whether they are free and not kept."""
        blank: npt.NDArray[np.bool_] = (self._counts[start:stop] == 0) & ~self._is_kept[start:stop]
        return blank

    def _behind(self, after: int | None, count: int) -> list[int] | None:
        """The blank blocks right behind that one."""
        if after is None or after + count >= self.total or not self._blank(after + 1, after + 1 + count).all():
            return None
        return list(range(after + 1, after + 1 + count))

    def _run(self, count: int) -> list[int] | None:
        """Contiguous blank blocks."""
        blank = self._blank(0, self.total)
        edges = np.flatnonzero(np.diff(blank, prepend=False, append=False))  # each run's start, and the block behind it
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if not len(starts) or lengths.max() < count:
            return None
        widest = int(lengths.argmax())
        start, length = int(starts[widest]), int(lengths[widest])
        if start > 0:  # before the first session there is nobody who would grow
            start += min(length // 2, length - count)
        return list(range(start, start + count))

    def _scattered(self, count: int) -> list[int]:
        """Blank blocks wherever they are, then those kept for the longest time."""
        blank: list[int] = np.flatnonzero(self._blank(0, self.total))[:count].tolist()
        while len(blank) < count:
            block = next(iter(self._kept))
            self._lose(block)
            blank.append(block)
        return blank

    def _lose(self, block: int) -> None:
        self._unkeep(block)
        self.lost(block)

    def _unkeep(self, block: int) -> None:
        del self._kept[block]
        self._is_kept[block] = False
