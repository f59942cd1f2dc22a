"""The bookkeeping every engine shares: opening, keeping, rolling back and closing sequences."""

from __future__ import annotations

from slipstream.engine.blocks import BlockPool
from slipstream.engine.sequence import Sequence
from slipstream.engine.step import Segment
from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange


class Bookkeeping:
    """All of `Engine` but the forward pass; `_move` is where an engine with real rows copies them."""

    def __init__(self, pool: BlockPool, max_length: int) -> None:
        self._pool = pool
        self._max_length = max_length

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
        blocks = self._pool.take(self._pool.blocks_for(capacity))
        return Sequence(blocks, self._pool.block_size, capacity)

    def keep(self, segment: Segment, path: list[int]) -> None:
        sequence = segment.sequence
        if sequence.closed or sequence.ahead != segment.tokens:
            raise FailedPrecondition("keep follows the forward of the same segment, once")
        if not segment.is_path(path):
            raise InvalidArgument(f"nodes {path} are not a path from the root of the candidates")
        root = sequence.length + len(segment.pending)
        moves = [(root + node, root + depth) for depth, node in enumerate(path) if node != depth]
        if moves:
            self._move(sequence, moves)
        sequence.length = root + len(path)
        sequence.ahead = 0

    def rollback(self, sequence: Sequence, length: int) -> None:
        if sequence.closed or not 0 <= length <= sequence.length:
            raise OutOfRange(f"cannot roll back to {length}: the sequence has {sequence.length} tokens")
        sequence.length = length
        sequence.ahead = 0

    def close(self, sequence: Sequence) -> None:
        if not sequence.closed:
            sequence.closed = True
            self._pool.release(sequence.blocks)

    def _move(self, sequence: Sequence, moves: list[tuple[int, int]]) -> None:
        """Rows (from slot, to slot), all read before any is written."""

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
