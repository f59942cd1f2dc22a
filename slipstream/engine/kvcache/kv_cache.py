"""The KV of one engine's sequences, in blocks: they begin, grow, commit, roll back and close.

The forward pass writes rows; everything here is bookkeeping, which belongs to the model's own thread while a pass runs,
and to the event loop between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.prefix_cache import PrefixCache, salt_digest
from slipstream.engine.segment import KVSequence, Segment
from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange

Moves = list[tuple[int, int]]
"""Pool rows (from, to); all are read before any is written."""


class KVCache:
    """Blocks of one pool, by sequence. Engines have one; a step is

    cache.grow(sequence, tokens)            # KV for what the step writes
    output = engine.forward(segments)       # rows for pending tokens and candidate nodes, nothing committed yet
    for segment, path in ...:
        cache.keep(segment, path)           # the accepted nodes become part of the sequence, the others vanish
    """

    def __init__(
        self,
        pool: BlockPool,
        max_length: int,
        copy_rows: Callable[[Moves], None] = lambda moves: None,
        on_drop: Callable[[KVSequence], None] = lambda sequence: None,
    ) -> None:
        """`max_length`: tokens of the model's longest sequence. `copy_rows` copies rows before the next pass. `on_drop`
        is called before rows of a sequence's committed tokens are given back."""
        self.max_length = max_length
        self._pool = pool
        self._copy_rows = copy_rows
        self._on_drop = on_drop
        self._prefixes = PrefixCache(pool.block_size)
        pool.on_evict = self._prefixes.drop_block

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._pool.block_size

    @property
    def blocks_total(self) -> int:
        return self._pool.total

    @property
    def blocks_free(self) -> int:
        return self._pool.free

    def begin(self, token_ids: Sequence[int], salt: str | None) -> KVSequence:
        """A sequence that starts with as much of `token_ids` as the cache holds under this salt: whole blocks, never
        the last token. It reserves nothing; `grow` does. With the salt None it shares nothing, now or later."""
        if salt is None:
            return KVSequence([], self._pool.block_size)
        blocks, digests = self._prefixes.find_prefix(token_ids[: len(token_ids) - 1], salt)
        self._pool.share(blocks)
        length = len(blocks) * self._pool.block_size
        return KVSequence(blocks, self._pool.block_size, salt, length, tokens=list(token_ids[:length]), digests=digests)

    def begin_unshared(self, capacity: int) -> KVSequence:
        """A sequence that shares nothing, with room for `capacity` tokens: for measurements. Raises
        ResourceExhausted."""
        sequence = self.begin((), None)
        self.grow(sequence, capacity)
        return sequence

    def missing(self, sequence: KVSequence, count: int) -> int:
        """Free blocks that it takes to write `count` more tokens."""
        more = max(0, self._pool.blocks_for(sequence.length + count) - len(sequence.blocks))
        if not sequence.rolled_back:
            return more
        shared = self._shared_block(sequence)
        return more + (shared is not None and self._pool.references(shared) > 1)

    def grow(self, sequence: KVSequence, count: int) -> None:
        """Reserves room to write `count` more tokens. Raises ResourceExhausted, changing nothing, when too few blocks
        are free."""
        missing = self.missing(sequence, count)
        if not missing and not sequence.rolled_back:
            return
        shared = self._shared_block(sequence) if sequence.rolled_back else None
        copied = shared is not None and self._pool.references(shared) > 1
        last = sequence.blocks[-1] if sequence.blocks and not copied else None
        taken = self._pool.allocate(missing, last)
        if shared is not None:
            self._make_private(sequence, shared, taken.pop(0) if copied else None)
        sequence.rolled_back = False
        if missing:
            sequence.blocks += taken
            sequence.blocks_changed()

    def keep(self, segment: Segment, path: list[int]) -> None:
        """Commits the pending tokens and the nodes of `path` (indices into nodes, root first) of the last forward.

        Raises InvalidArgument if the path is not one of the tree's, FailedPrecondition without a forward before.
        """
        sequence = segment.sequence
        if sequence.closed or sequence.ahead != segment.tokens:
            raise FailedPrecondition("keep follows the forward of the same segment, once")
        if not segment.is_path(path):
            raise InvalidArgument(f"nodes {path} are not a path from the root of the candidates")
        root = sequence.length + len(segment.pending)
        moves = [(root + node, root + depth) for depth, node in enumerate(path) if node != depth]
        if moves:
            rows = sequence.pool_rows(root, root + path[-1] + 1)
            self._copy_rows([(rows[source - root], rows[target - root]) for source, target in moves])
        sequence.length = root + len(path)
        sequence.ahead = 0
        sequence.tokens += [*segment.pending, *(segment.nodes[node] for node in path)]
        self._cache_full_blocks(sequence)

    def owned(self, sequence: KVSequence) -> int:
        """The least number of blocks that closing the sequence would free."""
        return sum(self._pool.references(block) == 1 for block in sequence.blocks)

    def disown(self, sequence: KVSequence) -> None:
        """Takes the sequence's blocks, whose contents are broken, out of the prefix cache."""
        for block in sequence.blocks:
            self._prefixes.drop_block(block)

    def rollback(self, sequence: KVSequence, length: int) -> None:
        """Drops all slots from `length` on; a sequence that began gives its blocks behind back, so it must grow again.
        Raises OutOfRange for a length the sequence does not have."""
        if sequence.closed or not 0 <= length <= sequence.length:
            raise OutOfRange(f"cannot roll back to {length}: the sequence has {sequence.length} tokens")
        if length < sequence.length:
            self._truncate(sequence, length)
        sequence.length = length
        sequence.ahead = 0

    def close(self, sequence: KVSequence) -> None:
        """Gives the sequence's blocks back to the pool. Those that no other sequence reads are free at once; full ones
        stay in the prefix cache until their room is needed. Closing twice is harmless."""
        if not sequence.closed:
            sequence.closed = True
            self._on_drop(sequence)
            self._release_blocks(sequence.blocks)

    def check_step(self, segments: list[Segment]) -> None:
        """Raises InvalidArgument for malformed segments, OutOfRange beyond the reserved capacity or the model's maximum
        length, FailedPrecondition for closed sequences; a sequence has one segment per step."""
        if not segments:
            raise InvalidArgument("a step needs at least one segment")
        if len({id(segment.sequence) for segment in segments}) < len(segments):
            raise InvalidArgument("two segments of one step belong to the same sequence")
        for segment in segments:
            segment.check()
            committed = segment.sequence.length + len(segment.pending)
            if committed > self.max_length:
                raise OutOfRange(f"{committed} tokens are more than the model's {self.max_length}; end the session")

    def _truncate(self, sequence: KVSequence, length: int) -> None:
        self._on_drop(sequence)
        sequence.rolled_back = True
        del sequence.tokens[length:]
        del sequence.digests[length // self.block_size :]
        if sequence.salt is not None:  # what was reserved at once stays reserved
            kept = self._pool.blocks_for(length)
            dead, sequence.blocks = sequence.blocks[kept:], sequence.blocks[:kept]
            self._release_blocks(dead)
            sequence.blocks_changed()

    def _release_blocks(self, blocks: list[int]) -> None:
        # The last ones first: the end of an unused prefix is evicted before its beginning.
        self._pool.release(blocks[::-1], self._prefixes.__contains__)

    def _shared_block(self, sequence: KVSequence) -> int | None:
        """The block of the next token, if it must not be written as it is: other sequences read it, or the prefix cache
        has its old contents. Only a rollback leads there."""
        index = sequence.length // self.block_size
        if index >= len(sequence.blocks):
            return None
        block = sequence.blocks[index]
        return block if self._pool.references(block) > 1 or block in self._prefixes else None

    def _make_private(self, sequence: KVSequence, shared: int, fresh: int | None) -> None:
        """Gives the sequence its last block alone: in place, or as a copy in `fresh`."""
        if fresh is None:
            self._prefixes.drop_block(shared)
            return
        size = self.block_size
        self._copy_rows([(shared * size + row, fresh * size + row) for row in range(sequence.length % size)])
        sequence.blocks[-1] = fresh
        self._release_blocks([shared])

    def _cache_full_blocks(self, sequence: KVSequence) -> None:
        """Adds the blocks that became full to the prefix cache."""
        if sequence.salt is None:
            return
        size = self.block_size
        while (index := len(sequence.digests)) < sequence.length // size:
            parent = sequence.digests[-1] if index else salt_digest(sequence.salt)
            tokens = sequence.tokens[index * size : (index + 1) * size]
            sequence.digests.append(self._prefixes.add_block(sequence.blocks[index], parent, tokens))
