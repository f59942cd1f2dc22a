"""The messages of a group: what was written is what is read, and nonsense is an error of ours, never a crash."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.segment import Segment, Sequence
from slipstream.engine.tensor_parallel.broadcast import (
    MAGIC,
    BroadcastStep,
    Kind,
    decode_step,
    encode,
    encode_step,
    kind_of,
)
from slipstream.errors import Internal

BLOCKS, SIZE = 40, 4
ROWS = st.integers(0, BLOCKS * SIZE - 1)
TOKENS = st.integers(0, 200_000)


@st.composite
def segments(draw: Any) -> Segment:
    pending = draw(st.lists(TOKENS, min_size=1, max_size=6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 6)))]
    nodes = [draw(TOKENS) for _ in parents]
    length = draw(st.integers(0, 60))
    spare = draw(st.integers(0, 2))
    count = -(-(length + len(pending) + len(nodes)) // SIZE) + spare
    contiguous = draw(st.booleans())
    first = draw(st.integers(0, BLOCKS - count))
    blocks = list(range(first, first + count)) if contiguous else draw(st.permutations(range(BLOCKS)))[:count]
    return Segment(Sequence(list(blocks), SIZE, length=length), pending, nodes, parents, draw(st.booleans()))


steps = st.builds(BroadcastStep, st.lists(st.tuples(ROWS, ROWS), max_size=5), st.lists(segments(), max_size=4))


@given(step=steps)
def test_what_was_written_is_read(step: BroadcastStep) -> None:
    words = encode_step(step)
    assert kind_of(words) is Kind.STEP
    read = decode_step(words, BLOCKS, SIZE)
    assert read.moves == step.moves
    assert len(read.segments) == len(step.segments)
    for mine, other in zip(step.segments, read.segments, strict=True):
        assert other.pending == mine.pending and other.nodes == mine.nodes
        assert other.parents == mine.parents and other.want_logits is mine.want_logits
        end = mine.sequence.length + mine.tokens
        assert other.sequence.length == mine.sequence.length
        assert other.sequence.pool_rows(0, end) == mine.sequence.pool_rows(0, end)
        assert other.sequence.capacity - end < SIZE  # blocks that are not read yet are not told


def test_contiguous_blocks_cost_nothing_however_long_the_text() -> None:
    def size(blocks: int) -> int:
        sequence = Sequence(list(range(blocks)), SIZE, length=blocks * SIZE - 1)
        return len(encode_step(BroadcastStep([], [Segment(sequence, [1])])))

    assert size(2) == size(2000) == 4 + 5 + 1 + 2


@given(step=steps, data=st.data())
def test_a_message_that_is_cut_or_longer_is_refused(step: BroadcastStep, data: st.DataObject) -> None:
    words = encode_step(step)
    end = data.draw(st.integers(2, len(words) - 1))
    for wrong in (words[:end], [*words, 0]):
        with pytest.raises(Internal) as refused:
            decode_step(wrong, BLOCKS, SIZE)
        assert refused.value.reason == "MESSAGE_BROKEN"


@given(step=steps, data=st.data())
def test_a_wrong_number_is_refused_or_is_another_step_inside_the_pool(step: BroadcastStep, data: st.DataObject) -> None:
    words = encode_step(step)
    at = data.draw(st.integers(2, len(words) - 1))
    words[at] = data.draw(st.integers(-3, 70) | st.integers(-(2**63), 2**63 - 1))
    try:
        read = decode_step(words, BLOCKS, SIZE)
    except Internal as error:
        assert error.reason == "MESSAGE_BROKEN"
        return
    for segment in read.segments:
        segment.check()
        assert segment.sequence.length >= 0
        assert set(segment.sequence.blocks) <= set(range(BLOCKS))
    assert all(0 <= row < BLOCKS * SIZE for pair in read.moves for row in pair)


@pytest.mark.parametrize("words", [[], [MAGIC], [MAGIC, 0], [MAGIC, 4], [MAGIC + 1, Kind.STEP], [0] * 9])
def test_what_is_no_message_of_this_version_is_refused(words: list[int]) -> None:
    with pytest.raises(Internal, match="same code"):
        kind_of(words)


def test_the_other_messages_are_only_their_kind() -> None:
    assert [kind_of(encode(kind)) for kind in (Kind.BEAT, Kind.END)] == [Kind.BEAT, Kind.END]
