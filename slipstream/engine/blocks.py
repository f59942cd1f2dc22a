"""The block pool: which KV rows belong to whom. Only the books; the rows themselves live in `slipstream.engine.kv`."""

from __future__ import annotations

from slipstream.errors import Internal, ResourceExhausted


class BlockPool:
    """Reference-counted blocks of `block_size` rows each. Always: blocks_free + blocks in use == total.

    `take` prefers one contiguous run, because a session whose rows are contiguous is read without a copy.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of at least one row, not {total} of {block_size}")
        self.total = total
        self.block_size = block_size
        self._counts = [0] * total
        self._free = total

    @property
    def free(self) -> int:
        return self._free

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises ResourceExhausted, taking nothing, when fewer are free."""
        if count > self._free:
            raise ResourceExhausted(
                f"{count} KV blocks are needed, {self._free} of {self.total} are free; try later or with fewer tokens.",
                reason="KV_EXHAUSTED",
            )
        blocks = self._best_run(count) or [block for block, used in enumerate(self._counts) if not used][:count]
        for block in blocks:
            self._counts[block] = 1
        self._free -= count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference on blocks that are in use."""
        if any(self._counts[block] == 0 for block in blocks):
            raise Internal("a free KV block cannot be shared")
        for block in blocks:
            self._counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less; a block without references is free again."""
        for block in blocks:
            if self._counts[block] == 0:
                raise Internal(f"KV block {block} was released more often than taken")
            self._counts[block] -= 1
            self._free += self._counts[block] == 0

    def _best_run(self, count: int) -> list[int] | None:
        """The smallest free run that fits (best fit keeps the large runs for the long sessions)."""
        best: tuple[int, int] | None = None
        start = 0
        for block in range(self.total + 1):
            if block < self.total and not self._counts[block]:
                continue
            length = block - start
            if length >= count and (best is None or length < best[0]):
                best = (length, start)
            start = block + 1
        return None if best is None else list(range(best[1], best[1] + count))
