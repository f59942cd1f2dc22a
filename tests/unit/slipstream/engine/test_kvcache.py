"""The block pool and the sequences on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.kvcache.prefix_cache import DIGEST_BYTES, PrefixCache, salt_digest
from slipstream.engine.kvcache.store import AttentionLayer, KVStore
from slipstream.engine.segment import KVSequence, Segment
from slipstream.errors import FailedPrecondition, Internal, InvalidArgument, OutOfRange, ResourceExhausted

BLOCKS, SIZE = 12, 4


class PoolMachine(RuleBasedStateMachine):
    """Sessions open, share, close and close again; the pool's books always balance."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.books = KVCache(self.pool, max_length=1000)
        self.held: list[list[int]] = []

    @rule(target=sequences, capacity=st.integers(1, BLOCKS * SIZE + 5))
    def open(self, capacity: int) -> KVSequence:
        need = -(-capacity // SIZE)
        if need > self.pool.free:
            with pytest.raises(ResourceExhausted):
                self.books.begin_unshared(capacity)
            return KVSequence([], SIZE, closed=True)
        sequence = self.books.begin_unshared(capacity)
        assert len(set(sequence.blocks)) == len(sequence.blocks) == need
        assert not {block for blocks in self.held for block in blocks} & set(sequence.blocks)
        self.held.append(sequence.blocks)
        return sequence

    @rule(sequence=sequences)
    def share(self, sequence: KVSequence) -> None:
        if not sequence.closed:
            self.pool.share(sequence.blocks)
            self.held.append(list(sequence.blocks))

    @rule(data=st.data())
    def release_shared(self, data: st.DataObject) -> None:
        extra = [at for at, blocks in enumerate(self.held) if self.held.index(blocks) != at]
        if extra:
            self.pool.release(self.held.pop(data.draw(st.sampled_from(extra))))

    @rule(sequence=consumes(sequences), times=st.integers(1, 3))
    def close(self, sequence: KVSequence, times: int) -> None:
        if not sequence.closed:
            self.held.remove(sequence.blocks)
        for _ in range(times):
            self.books.close(sequence)

    @invariant()
    def books_balance(self) -> None:
        used = {block for blocks in self.held for block in blocks}
        assert self.pool.free + len(used) == self.pool.total


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_contiguous_run_is_taken_from_the_middle_of_the_widest_one() -> None:
    pool = BlockPool(16, SIZE)
    first, second, third = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    assert (first, second) == ([0, 1], [9, 10])
    assert third == [5, 6]
    assert pool.allocate(2, after=6) == [7, 8]  # there was room behind it
    assert pool.allocate(5, after=1) == [11, 12, 13, 14, 15]  # and less than five here
    assert sorted(pool.allocate(3)) == [2, 3, 4]


def test_a_run_behind_a_block_in_use_is_taken_from_its_middle_too() -> None:
    pool = BlockPool(8, 1)
    pool.release(pool.allocate(8)[1:])
    assert pool.allocate(2) == [4, 5]


def test_no_more_than_half_of_the_blocks_stay_cached() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(pool.allocate(4), lambda block: True)
    assert (pool.cached, pool.free) == (2, 4)


def test_scattered_blocks_are_taken_when_no_run_is_long_enough() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(4)
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    assert sorted(pool.allocate(2)) == [0, 2]


def test_releasing_or_sharing_free_blocks_is_a_bug() -> None:
    pool = BlockPool(2, SIZE)
    with pytest.raises(Internal):
        pool.release([0])
    with pytest.raises(Internal):
        pool.share([1])


def test_pool_rows_follow_the_block_table() -> None:
    assert KVSequence([2, 3], SIZE).pool_rows(3, 6) == [11, 12, 13]
    scattered = KVSequence([5, 1], SIZE)
    assert scattered.pool_rows(2, 6) == [22, 23, 4, 5]
    assert scattered.rows is not None and scattered.rows[2:6].tolist() == [22, 23, 4, 5]


@pytest.fixture
def books() -> KVCache:
    return KVCache(BlockPool(BLOCKS, SIZE), max_length=20)


def test_capacity_is_bounded(books: KVCache) -> None:
    with pytest.raises(ResourceExhausted):
        books.begin_unshared(BLOCKS * SIZE + 1)
    sequence = books.begin_unshared(6)  # two blocks of four
    with pytest.raises(OutOfRange):
        Segment(sequence, [1] * 7, [1, 1], [-1, 0]).check()


@pytest.mark.parametrize(
    "segment",
    [
        Segment(KVSequence([0], SIZE), []),
        Segment(KVSequence([0], SIZE), [1], [2], []),
        Segment(KVSequence([0], SIZE), [1], [2], [0]),
        Segment(KVSequence([0], SIZE), [1], [2], [-2]),
    ],
    ids=["nothing pending", "a parent missing", "its own parent", "no such parent"],
)
def test_malformed_segments_are_refused(segment: Segment) -> None:
    with pytest.raises(InvalidArgument):
        segment.check()


def test_keep_requires_a_forward_pass_and_a_valid_path(books: KVCache) -> None:
    segment = Segment(books.begin_unshared(16), [1, 2], [3, 4, 5], [-1, -1, 0])
    with pytest.raises(FailedPrecondition):
        books.keep(segment, [])
    segment.sequence.ahead = segment.tokens
    for path in ([2], [0, 1], [3], [-1]):
        with pytest.raises(InvalidArgument):
            books.keep(segment, path)
    books.keep(segment, [0, 2])
    assert segment.sequence.length == 4
    with pytest.raises(FailedPrecondition):
        books.keep(segment, [0, 2])


def test_a_single_token_can_be_kept_only_once(books: KVCache) -> None:
    segment = Segment(books.begin_unshared(8), [1])
    segment.sequence.ahead = 1
    books.keep(segment, [])
    with pytest.raises(FailedPrecondition):
        books.keep(segment, [])


def test_rollback_only_shortens(books: KVCache) -> None:
    sequence = books.begin_unshared(16)
    sequence.length = 7
    with pytest.raises(OutOfRange):
        books.rollback(sequence, 8)
    books.rollback(sequence, 3)
    assert sequence.length == 3
    books.close(sequence)
    with pytest.raises(OutOfRange):
        books.rollback(sequence, 0)
    with pytest.raises(FailedPrecondition):
        Segment(sequence, [1]).check()


def test_a_copy_of_a_row_that_is_to_be_written_is_one_of_its_source() -> None:
    layer = AttentionLayer(0, 0, 1, 1, 1, None, torch.float32, torch.device("cpu"))
    store = KVStore([layer], rows=6)
    rows = torch.arange(6.0).view(1, 1, 6, 1)
    store.write(0, torch.arange(6), rows, rows)
    store.queue_moves([(3, 2), (5, 3)])
    store.queue_moves([(2, 0), (3, 1)])
    store.apply_moves()
    assert store.read(0)[0].flatten().tolist() == [3, 5, 3, 5, 4, 5]


def test_moves_read_every_row_before_writing_any() -> None:
    layer = AttentionLayer(0, 0, 1, 2, 3, None, torch.float32, torch.device("cpu"))
    shared = AttentionLayer(1, 0, 1, 2, 3, None, torch.float32, torch.device("cpu"))
    store = KVStore([layer, shared], rows=6)
    rows = torch.arange(6)
    key = torch.arange(6.0).view(1, 1, 6, 1).expand(-1, -1, -1, 2)
    store.write(0, rows, key, torch.zeros(1, 1, 6, 3))
    store.write(1, rows, key + 9, torch.zeros(1, 1, 6, 3))
    store.queue_moves([(2, 1), (3, 2), (5, 3)])
    store.apply_moves()
    assert store.read(1)[0][0, 0, :, 0].tolist() == [0, 2, 3, 5, 4, 5]


def test_a_pool_holds_whole_blocks_only() -> None:
    assert (BlockPool.holding(11, 4).total, BlockPool.holding(11, 4).block_size) == (2, 4)
    assert BlockPool.holding(4, 4).total == 1
    with pytest.raises(ResourceExhausted):
        BlockPool.holding(3, 4)


@pytest.mark.parametrize("total, size", [(0, 4), (4, 0)])
def test_a_pool_without_rows_is_no_pool(total: int, size: int) -> None:
    with pytest.raises(ValueError):
        BlockPool(total, size)


def test_a_step_that_cannot_be_is_refused(books: KVCache) -> None:
    first, second = books.begin_unshared(24), books.begin_unshared(4)
    with pytest.raises(InvalidArgument):
        books.check_step([])
    with pytest.raises(InvalidArgument):
        books.check_step([Segment(first, [1]), Segment(second, [1]), Segment(first, [2])])
    with pytest.raises(InvalidArgument):
        books.check_step([Segment(second, [1]), Segment(first, [])])
    first.length = 18
    books.check_step([Segment(first, [1, 2], [3, 4], [-1, 0]), Segment(second, [1])])  # candidates may lie beyond 20
    with pytest.raises(OutOfRange):
        books.check_step([Segment(second, [1]), Segment(first, [1, 2, 3])])


def test_the_blocks_a_sequence_holds_alone_are_counted(books: KVCache) -> None:
    sequence = books.begin_unshared(12)
    assert books.owned(sequence) == 3
    books._pool.share(sequence.blocks[:1])
    assert books.owned(sequence) == 2
    books._pool.share(sequence.blocks[:1])
    assert books.owned(sequence) == 2


def test_a_block_that_was_never_cached_is_dropped_without_harm() -> None:
    names = PrefixCache(4)
    names.drop_block(7)
    assert (
        len(salt_digest("salt")) == DIGEST_BYTES and len(names.add_block(0, salt_digest(""), [1] * 4)) == DIGEST_BYTES
    )


def test_moves_that_failed_halfway_are_finished_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of different sizes are two groups; row 2 is read by one move and written by another."""
    store = KVStore([AttentionLayer(0, 0, 1, 2, 3, None, torch.float32, torch.device("cpu"))], rows=6)
    rows = torch.arange(6)
    key, value = (torch.arange(6.0).view(1, 1, 6, 1).expand(-1, -1, -1, size) for size in (2, 3))
    store.write(0, rows, key, value)
    store.queue_moves([(2, 1), (3, 2), (5, 3)])
    copy, copies = torch.Tensor.index_copy_, list[torch.Tensor]()

    def failing(tensor: torch.Tensor, *asked: Any) -> torch.Tensor:
        copies.append(tensor)
        if len(copies) == 2:
            raise RuntimeError("out of memory")
        return copy(tensor, *asked)

    monkeypatch.setattr(torch.Tensor, "index_copy_", failing)
    with pytest.raises(RuntimeError):
        store.apply_moves()
    store.apply_moves()
    assert [each[0, 0, :, 0].tolist() for each in store.read(0)] == [[0, 2, 3, 5, 4, 5]] * 2
