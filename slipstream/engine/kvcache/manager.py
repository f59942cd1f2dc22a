"""The bookkeeping every engine shares: opening, growing, keeping, rolling back and closing sequences."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.prefix_cache import PrefixCache, root
from slipstream.engine.kvcache.sequence import Sequence
from slipstream.engine.segment import Segment
from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange


class KVCacheManager:
    """All of `Engine` but the forward pass; `_copy` is where an engine with real rows copies them."""

    def __init__(self, pool: BlockPool, max_length: int) -> None:
        self._pool = pool
        self._max_length = max_length
        self._prefixes = PrefixCache(pool.block_size)
        pool.lost = self._prefixes.forget

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def blocks_total(self) -> int:
        return self._pool.total

    @property
    def blocks_free(self) -> int:
        return self._pool.free

    def open(self, capacity: int) -> Sequence:
        if capacity < 1:
            raise OutOfRange(f"a sequence needs room for at least one token, not {capacity}")
        return Sequence(self._pool.take(self._pool.blocks_for(capacity)), self._pool.block_size)

    def begin(self, token_ids: Tokens[int], salt: str) -> Sequence:
        blocks, digests = self._prefixes.find(token_ids[: len(token_ids) - 1], salt)
        self._pool.share(blocks)
        length = len(blocks) * self._pool.block_size
        return Sequence(blocks, self._pool.block_size, salt, length, tokens=list(token_ids[:length]), digests=digests)

    def missing(self, sequence: Sequence, count: int) -> int:
        more = max(0, self._pool.blocks_for(sequence.length + count) - len(sequence.blocks))
        if not sequence.cut:
            return more
        begun = self._begun(sequence)
        return more + (begun is not None and self._pool.count(begun) > 1)

    def grow(self, sequence: Sequence, count: int) -> None:
        missing = self.missing(sequence, count)
        if not missing and not sequence.cut:
            return
        begun = self._begun(sequence) if sequence.cut else None
        copied = begun is not None and self._pool.count(begun) > 1
        last = sequence.blocks[-1] if sequence.blocks and not copied else None
        taken = self._pool.take(missing, last)
        if begun is not None:
            self._own(sequence, begun, taken.pop(0) if copied else None)
        sequence.cut = False
        if missing:
            sequence.blocks += taken
            sequence.moved()

    def keep(self, segment: Segment, path: list[int]) -> None:
        sequence = segment.sequence
        if sequence.closed or sequence.ahead != segment.tokens:
            raise FailedPrecondition("keep follows the forward of the same segment, once")
        if not segment.is_path(path):
            raise InvalidArgument(f"nodes {path} are not a path from the root of the candidates")
        root = sequence.length + len(segment.pending)
        moves = [(root + node, root + depth) for depth, node in enumerate(path) if node != depth]
        if moves:
            rows = sequence.pool_rows(root, root + path[-1] + 1)
            self._copy([(rows[source - root], rows[target - root]) for source, target in moves])
        sequence.length = root + len(path)
        sequence.ahead = 0
        sequence.tokens += [*segment.pending, *(segment.nodes[node] for node in path)]
        self._name(sequence)

    def owned(self, sequence: Sequence) -> int:
        return sum(self._pool.count(block) == 1 for block in sequence.blocks)

    def disown(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self._prefixes.forget(block)

    def rollback(self, sequence: Sequence, length: int) -> None:
        if sequence.closed or not 0 <= length <= sequence.length:
            raise OutOfRange(f"cannot roll back to {length}: the sequence has {sequence.length} tokens")
        if length < sequence.length:
            self._cut(sequence, length)
        sequence.length = length
        sequence.ahead = 0

    def close(self, sequence: Sequence) -> None:
        if not sequence.closed:
            sequence.closed = True
            self._release(sequence.blocks)

    def _cut(self, sequence: Sequence, length: int) -> None:
        sequence.cut = True
        del sequence.tokens[length:]
        del sequence.digests[length // self.block_size :]
        if sequence.salt is not None:  # what was reserved at once stays reserved
            kept = self._pool.blocks_for(length)
            dead, sequence.blocks = sequence.blocks[kept:], sequence.blocks[:kept]
            self._release(dead)
            sequence.moved()

    def _release(self, blocks: list[int]) -> None:
        # The last ones first: of a prefix that nobody uses the end is forgotten before its beginning.
        self._pool.release(blocks[::-1], self._prefixes.__contains__)

    def _begun(self, sequence: Sequence) -> int | None:
        """The block that the next token falls into, if it may not be written as it is: others read it, or it is known
        for what was in it. Only a rollback leads there."""
        index = sequence.length // self.block_size
        if index >= len(sequence.blocks):
            return None
        block = sequence.blocks[index]
        return block if self._pool.count(block) > 1 or block in self._prefixes else None

    def _own(self, sequence: Sequence, begun: int, fresh: int | None) -> None:
        """The block, which is the last one, becomes the sequence's alone: in place, or as a copy in `fresh`."""
        if fresh is None:
            self._prefixes.forget(begun)
            return
        size = self.block_size
        self._copy([(begun * size + row, fresh * size + row) for row in range(sequence.length % size)])
        sequence.blocks[-1] = fresh
        self._release([begun])

    def _name(self, sequence: Sequence) -> None:
        """Blocks that became full can be found from now on."""
        if sequence.salt is None:
            return
        size = self.block_size
        while (index := len(sequence.digests)) < sequence.length // size:
            above = sequence.digests[-1] if index else root(sequence.salt)
            tokens = sequence.tokens[index * size : (index + 1) * size]
            sequence.digests.append(self._prefixes.name(sequence.blocks[index], above, tokens))

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        """Pool rows (from, to), all read before any is written."""

    def _begin(self, segments: list[Segment]) -> None:
        """Checks a step before it runs; a session may bring one segment only."""
        if not segments:
            raise InvalidArgument("a step needs at least one segment")
        if len({id(segment.sequence) for segment in segments}) < len(segments):
            raise InvalidArgument("two segments of one step belong to the same sequence")
        for segment in segments:
            segment.check()
            committed = segment.sequence.length + len(segment.pending)
            if committed > self._max_length:
                raise OutOfRange(f"{committed} tokens are more than the model's {self._max_length}; end the session")
