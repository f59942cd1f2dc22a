"""Sharing prefixes: whoever reads a row finds there what it computed itself, or what somebody computed from the same
tokens under the same salt; and every block comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from slipstream.engine.kvcache.block_pool import MAX_CACHED_SHARE, BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.kvcache.prefix_cache import PrefixCache, salt_digest
from slipstream.engine.segment import KVSequence, Segment
from slipstream.errors import Internal, ResourceExhausted

BLOCKS, SIZE = 10, 4
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
Row = tuple[str | None, tuple[int, ...]]
"""What a row's KV was computed from: whose it is, and all tokens up to its own."""


class Books(KVCache):
    """Rows that remember what they were computed from."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__(BlockPool(blocks, SIZE), 1000, self._queue)
        self.pool = self._pool
        self.prefixes = self._prefixes
        self.rows: dict[int, Row] = {}
        self.queued: dict[int, int] = {}

    def forward(self, segment: Segment) -> None:
        sequence = segment.sequence
        segment.check()
        self.rows |= {target: self.rows[source] for target, source in self.queued.items()}
        self.queued = {}
        rows = sequence.pool_rows(sequence.length, sequence.length + segment.tokens)
        owner = sequence.salt
        known = tuple(sequence.tokens)
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(segment.parents):
            parent = paths[parent] if parent >= 0 else (*known, *segment.pending)
            paths.append((*parent, segment.nodes[node]))
        chain = [(*known, *segment.pending[: end + 1]) for end in range(len(segment.pending))]
        for row, tokens in zip(rows, [*chain, *paths], strict=True):
            assert self.pool.references(row // SIZE) == 1 and row // SIZE not in self.prefixes  # nobody else reads it
            self.rows[row] = owner, tokens
        sequence.ahead = segment.tokens

    def _queue(self, moves: list[tuple[int, int]]) -> None:
        """As `KVStore.queue_moves`: before the next pass."""
        self.queued |= {target: self.queued.get(source, source) for source, target in moves}

    def row(self, row: int) -> Row:
        """As the next pass finds it."""
        return self.rows[self.queued.get(row, row)]

    def holds(self, sequence: KVSequence) -> list[Row]:
        return [self.row(row) for row in sequence.pool_rows(0, sequence.length)]


@dataclass(eq=False)
class Writer:
    """A session: its sequence, and all its tokens."""

    sequence: KVSequence
    tokens: list[int] = field(default_factory=list)


class SharingMachine(RuleBasedStateMachine):
    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.alive: list[Writer] = []

    @rule(target=writers, prompt=PROMPTS, salt=st.sampled_from(["", "a"]))
    def begin(self, prompt: list[int], salt: str) -> Writer:
        writer = Writer(self.books.begin(prompt, salt), list(prompt))
        sequence = writer.sequence
        assert sequence.length < len(prompt) and sequence.length % SIZE == 0
        assert sequence.tokens == prompt[: sequence.length]
        self.alive.append(writer)
        return writer

    @rule(writer=writers, data=st.data())
    def step(self, writer: Writer, data: st.DataObject) -> None:
        """Some of what is pending, and candidates of which a path is accepted."""
        sequence = writer.sequence
        if sequence.closed:
            return
        waiting = writer.tokens[sequence.length :]
        pending = waiting[: data.draw(st.integers(1, len(waiting)))]
        count = data.draw(st.integers(0, 4)) if len(pending) == len(waiting) else 0
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
        segment = Segment(sequence, pending, [data.draw(st.integers(0, 1)) for _ in range(count)], parents)
        missing = self.books.missing(sequence, segment.tokens)
        if missing > self.books.blocks_free:
            before = list(sequence.blocks)
            with pytest.raises(ResourceExhausted):
                self.books.grow(sequence, segment.tokens)
            assert sequence.blocks == before
            return
        free = self.books.blocks_free
        self.books.grow(sequence, segment.tokens)
        # A copy gives its original back to those who share it, who are still there.
        assert self.books.blocks_free == free - missing
        self.books.forward(segment)
        path: list[int] = []
        while children := [node for node, parent in enumerate(parents) if parent == (path[-1] if path else -1)]:
            if not data.draw(st.booleans()):
                break
            path.append(data.draw(st.sampled_from(children)))
        self.books.keep(segment, path)
        if len(pending) == len(waiting):
            writer.tokens += [segment.nodes[node] for node in path]
            writer.tokens.append(data.draw(st.integers(0, 1)))

    @rule(writer=writers, data=st.data())
    def roll_back(self, writer: Writer, data: st.DataObject) -> None:
        if not writer.sequence.closed:
            length = data.draw(st.integers(0, writer.sequence.length))
            self.books.rollback(writer.sequence, length)
            writer.tokens = writer.tokens[: length + 1]

    @rule(writer=consumes(writers))
    def close(self, writer: Writer) -> None:
        self.books.close(writer.sequence)
        self.books.close(writer.sequence)
        if writer in self.alive:
            self.alive.remove(writer)

    @invariant()
    def everybody_reads_what_it_would_have_written(self) -> None:
        for writer in self.alive:
            sequence, tokens = writer.sequence, writer.tokens
            assert sequence.tokens == tokens[: sequence.length]
            assert self.books.holds(sequence) == [
                (sequence.salt, tuple(tokens[: slot + 1])) for slot in range(sequence.length)
            ]

    @invariant()
    def named_blocks_hold_what_their_names_say(self) -> None:
        for block in filter(self.books.prefixes.__contains__, range(BLOCKS)):
            salt, tokens = self.books.row(block * SIZE + SIZE - 1)
            found, _ = self.books.prefixes.find_prefix(tokens, salt or "")
            assert found[-1:] == [block] or len(found) < len(tokens) // SIZE  # what is parent it was forgotten

    @invariant()
    def the_books_balance(self) -> None:
        pool = self.books.pool
        uses = [block for writer in self.alive for block in writer.sequence.blocks]
        assert [pool.references(block) for block in range(BLOCKS)] == [uses.count(block) for block in range(BLOCKS)]
        assert pool.free == BLOCKS - len(set(uses))
        assert pool.cached <= BLOCKS * MAX_CACHED_SHARE

    def teardown(self) -> None:
        for writer in self.alive:
            self.books.close(writer.sequence)
        assert self.books.blocks_free == BLOCKS


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def write(books: Books, tokens: list[int], salt: str = "") -> KVSequence:
    """A sequence whose rows hold all tokens but the last."""
    sequence = books.begin(tokens, salt)
    segment = Segment(sequence, tokens[sequence.length : -1])
    if segment.pending:
        books.grow(sequence, segment.tokens)
        books.forward(segment)
        books.keep(segment, [])
    return sequence


def test_a_prompt_whose_beginning_is_known_is_not_computed_again() -> None:
    books = Books()
    first = write(books, [*range(10)])
    second = books.begin([*range(9), 77], "")
    assert second.length == 8 and second.blocks == first.blocks[:2]


def test_the_last_token_is_always_computed() -> None:
    books = Books()
    write(books, [*range(9)])
    assert books.begin([*range(8)], "").length == 4


def test_tenants_share_nothing() -> None:
    books = Books()
    write(books, [*range(10)], "a")
    assert books.begin([*range(10)], "b").length == 0
    assert books.begin([*range(10)], "").length == 0
    assert books.begin([*range(10)], "a").length == 8


def test_blocks_of_closed_sequences_are_found_until_they_are_evicted_oldest_first() -> None:
    books = Books()
    books.close(write(books, [1] * 9))
    books.close(write(books, [2] * 9))
    assert books.blocks_free == BLOCKS and books.pool.cached == 4
    whole = books.begin_unshared((BLOCKS - 3) * SIZE)  # all blank blocks, and one kept one
    assert books.begin([1] * 9, "").length == 4  # its end went first
    assert books.begin([2] * 9, "").length == 8
    books.close(whole)


def test_blocks_of_a_broken_sequence_are_not_found_again() -> None:
    books = Books()
    first = write(books, [*range(10)])
    second = books.begin([*range(10)], "")
    assert second.length == 8
    books.disown(second)
    books.close(second)
    assert books.begin([*range(10)], "").length == 0
    books.close(first)
    assert books.begin([*range(10)], "").length == 0 and books.blocks_free == BLOCKS


def test_a_rollback_into_a_shared_block_copies_it() -> None:
    books = Books()
    first, second = write(books, [*range(9)]), write(books, [*range(9)])
    assert first.blocks == second.blocks
    books.rollback(second, 6)
    assert books.missing(second, 2) == 1
    books.grow(second, 2)
    books.forward(Segment(second, [70, 71]))
    books.keep(Segment(second, [70, 71]), [])
    assert books.holds(first) == [("", tuple(range(slot + 1))) for slot in range(8)]
    assert [tokens[-1] for _, tokens in books.holds(second)] == [0, 1, 2, 3, 4, 5, 70, 71]


def test_reserved_sequences_share_nothing_and_keep_their_room() -> None:
    books = Books()
    sequence = books.begin_unshared(12)
    books.forward(Segment(sequence, [*range(9)]))
    books.keep(Segment(sequence, [*range(9)]), [])
    assert not len(books.prefixes)
    books.rollback(sequence, 0)
    assert sequence.capacity == 12 and books.missing(sequence, 12) == 0


def test_sequences_grow_in_place_as_long_as_their_neighbours_leave_room() -> None:
    books = Books(blocks=64)
    some = [write(books, [number] * 6) for number in range(4)]
    for sequence in some:
        for _ in range(5):
            books.grow(sequence, SIZE)
            segment = Segment(sequence, [9] * SIZE)
            books.forward(segment)
            books.keep(segment, [])
    assert all(sequence.rows is None for sequence in some)


def test_equal_tokens_behind_different_ones_have_different_names() -> None:
    names = PrefixCache(2)
    assert names.add_block(0, salt_digest(""), [1, 2]) != names.add_block(1, salt_digest("salt"), [1, 2])
    first = names.add_block(2, salt_digest(""), [3, 3])
    assert names.add_block(3, first, [1, 2]) != names.add_block(4, salt_digest(""), [1, 2])
    assert names.find_prefix([3, 3, 1, 2, 5, 5], "")[0] == [2, 3]


def test_a_rollback_into_the_last_of_three_shared_blocks_replaces_that_one_alone() -> None:
    books = Books()
    first, second = write(books, [*range(13)]), write(books, [*range(13)])
    assert len(first.blocks) == 3 and first.blocks == second.blocks
    books.rollback(second, 10)
    books.grow(second, 1)
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] not in first.blocks
    assert [books.pool.references(block) for block in first.blocks] == [2, 2, 1]
    assert [tokens[-1] for _, tokens in books.holds(second)] == [*range(10)]
    assert books.missing(second, 1) == 0, "the copy is its own"


def test_a_rollback_into_an_unshared_block_writes_there_and_its_old_contents_are_not_found() -> None:
    books = Books()
    sequence = write(books, [*range(9)])
    blocks, free = list(sequence.blocks), books.blocks_free
    books.rollback(sequence, 6)
    assert books.missing(sequence, 2) == 0
    books.grow(sequence, 2)
    assert (sequence.blocks, books.blocks_free) == (blocks, free)
    assert books.begin([*range(9)], "").length == 4, "the block that is written again is not found"
    assert not sequence.rolled_back


def test_a_rollback_into_a_shared_block_that_is_no_longer_cached_copies_it_too() -> None:
    books = Books()
    first, second = write(books, [*range(9)]), write(books, [*range(9)])
    books.disown(first)
    books.rollback(second, 6)
    books.grow(second, 2)
    assert second.blocks[1] not in first.blocks
    assert books.holds(first) == [("", tuple(range(slot + 1))) for slot in range(8)]


def test_a_rollback_to_where_it_stands_keeps_what_is_reserved() -> None:
    books = Books()
    sequence = write(books, [*range(9)])
    books.grow(sequence, 2 * SIZE)
    reserved = list(sequence.blocks)
    sequence.ahead = 3
    books.rollback(sequence, sequence.length)
    assert (sequence.blocks, sequence.ahead, sequence.rolled_back) == (reserved, 0, False)


def test_accepted_nodes_move_behind_the_pending_tokens() -> None:
    """Also where the sequence's blocks are scattered, and where the path begins at its place already."""
    for fillers in (0, 1):
        books = Books()
        sequence = write(books, [1, 2, 3, 4, 5])
        others = [books.begin_unshared(SIZE) for _ in range(fillers * 9)]
        for other in others[:7]:
            books.close(other)
        segment = Segment(sequence, [5, 6], [10, 11, 12, 13, 14], [-1, -1, 1, 0, 2])
        books.grow(sequence, segment.tokens)
        books.forward(segment)
        books.keep(segment, [1, 2, 4])
        assert sequence.length == 9
        assert books.holds(sequence)[-1] == ("", (1, 2, 3, 4, 5, 6, 11, 12, 14))
        assert [tokens[-1] for _, tokens in books.holds(sequence)] == [1, 2, 3, 4, 5, 6, 11, 12, 14]
        assert sequence.tokens == [1, 2, 3, 4, 5, 6, 11, 12, 14]


def test_a_pool_that_evicts_a_block_keeps_it_out_of_the_cache() -> None:
    pool = BlockPool(4, SIZE)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    blocks = pool.allocate(4)
    pool.release(blocks[:2], lambda block: True)
    assert pool.cached == 2
    assert sorted(pool.allocate(2)) == sorted(blocks[:2]) == sorted(evicted)
    assert pool.cached == 0
    pool.release(blocks[:1])
    assert pool.cached == 0 and pool.free == 1
    with pytest.raises(Internal):
        pool.share(blocks[:1])  # its contents are gone
    pool.allocate(1)
    assert evicted == evicted[:2], "a blank block is nobody's"


def test_a_cached_block_that_is_shared_again_is_evicted_no_more() -> None:
    pool = BlockPool(4, SIZE)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    blocks = pool.allocate(4)
    pool.release(blocks[:1], lambda block: True)
    pool.share(blocks[:1])
    assert (pool.cached, pool.free, pool.references(blocks[0])) == (0, 0, 1)
    pool.release(blocks[:1])
    assert pool.allocate(1) == blocks[:1] and not evicted
