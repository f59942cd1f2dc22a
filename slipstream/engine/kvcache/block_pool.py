"""The block pool: the reference counts of KV blocks. The rows themselves live in `slipstream.engine.kvcache.store`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slipstream.errors import Internal, ResourceExhausted

MAX_CACHED_SHARE = 0.5
"""The share of the pool that free blocks may hold for their contents: the rest stays blank, so that new sessions get
contiguous runs."""


class BlockPool:
    """Reference-counted blocks of `block_size` rows each. Always: blocks free + blocks in use == total.

    A free block may stay *cached*: another session may want its contents (`slipstream.engine.kvcache.prefix_cache`), so
    it is allocated after all blank ones, the block released first before the others.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of at least one row, not {total} of {block_size}")
        self.total = total
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda block: None
        """Called with each cached block that is allocated for other contents."""
        self._counts = np.zeros(total, np.int32)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._is_cached = np.zeros(total, bool)
        self._free = total

    @classmethod
    def holding(cls, tokens: int, block_size: int) -> BlockPool:
        """As many whole blocks as `tokens` rows fill. Raises ResourceExhausted when they do not fill one."""
        if tokens < block_size:
            raise ResourceExhausted(f"KV for {tokens} tokens is less than one block of {block_size}; give more memory.")
        return cls(tokens // block_size, block_size)

    @property
    def free(self) -> int:
        """Blocks without references, cached ones included."""
        return self._free

    @property
    def cached(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        """References on the block."""
        return int(self._counts[block])

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
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
        blocks = self._allocate_behind(after, count) or self._allocate_run(count) or self._allocate_scattered(count)
        self._counts[blocks] = 1
        self._free -= count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Adds a reference to blocks that are in use or cached."""
        for block in blocks:
            if self._counts[block] == 0:
                if not self._is_cached[block]:
                    raise Internal("a free KV block cannot be shared")
                self._uncache(block)
                self._free -= 1
            self._counts[block] += 1

    def release(self, blocks: list[int], cache: Callable[[int], bool] = lambda block: False) -> None:
        """Removes a reference. A block without references is free again, and stays cached if `cache` returns True."""
        for block in blocks:
            if self._counts[block] == 0:
                raise Internal(f"KV block {block} was released more often than taken")
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free += 1
                if cache(block):
                    self._cached[block] = None
                    self._is_cached[block] = True
        while len(self._cached) > self.total * MAX_CACHED_SHARE:
            self._evict(next(iter(self._cached)))

    def _blank(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """bool [stop - start]: the blocks that are free and not cached."""
        blank: npt.NDArray[np.bool_] = (self._counts[start:stop] == 0) & ~self._is_cached[start:stop]
        return blank

    def _allocate_behind(self, after: int | None, count: int) -> list[int] | None:
        """The blank blocks right behind block `after`, if there are as many."""
        if after is None or after + count >= self.total or not self._blank(after + 1, after + 1 + count).all():
            return None
        return list(range(after + 1, after + 1 + count))

    def _allocate_run(self, count: int) -> list[int] | None:
        """Contiguous blank blocks."""
        blank = self._blank(0, self.total)
        edges = np.flatnonzero(np.diff(blank, prepend=False, append=False))  # each run's start, and the block behind it
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if not len(starts) or lengths.max() < count:
            return None
        widest = int(lengths.argmax())
        start, length = int(starts[widest]), int(lengths[widest])
        if start > 0:  # no session before it would grow into its beginning
            start += min(length // 2, length - count)
        return list(range(start, start + count))

    def _allocate_scattered(self, count: int) -> list[int]:
        """Blank blocks wherever they are, then those cached for the longest time."""
        blank: list[int] = np.flatnonzero(self._blank(0, self.total))[:count].tolist()
        while len(blank) < count:
            block = next(iter(self._cached))
            self._evict(block)
            blank.append(block)
        return blank

    def _evict(self, block: int) -> None:
        self._uncache(block)
        self.on_evict(block)

    def _uncache(self, block: int) -> None:
        del self._cached[block]
        self._is_cached[block] = False
