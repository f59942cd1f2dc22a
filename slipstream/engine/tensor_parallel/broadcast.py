"""A step as one row of integers: what the leader of a group tells the other ranks before each pass.

    [MAGIC, STEP, moves, segments]
    per move      [from, to]                                          pool rows, carried out before the pass
    per segment   [length, pending, nodes, want_logits, runs]         the first a number of tokens, then counts
                  pending token ids, node token ids, parents
                  per run of blocks [first, count]                    those that hold its tokens and the step's

The other messages are [MAGIC, BEAT] and [MAGIC, END]. The layout is fixed and holds numbers alone, so reading a message
runs nothing. Whoever reads it needs no memory of earlier steps but the KV rows themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from slipstream.engine.segment import Segment
from slipstream.engine.segment import Sequence as KV
from slipstream.errors import Internal, SlipstreamError

MAGIC = 0x51_1D_01
"""The layout's name and version: ranks that run different code must not understand each other by chance."""


class Kind(IntEnum):
    STEP = 1
    BEAT = 2
    """The leader is alive and has nothing to do."""
    END = 3


@dataclass(frozen=True, slots=True)
class BroadcastStep:
    moves: list[tuple[int, int]]
    """Pool rows (from, to), all read before any is written."""
    segments: list[Segment]


def encode(kind: Kind) -> list[int]:
    """A message that is only its kind."""
    return [MAGIC, kind]


def encode_step(step: BroadcastStep) -> list[int]:
    words = [MAGIC, Kind.STEP, len(step.moves), len(step.segments)]
    for move in step.moves:
        words += move
    for segment in step.segments:
        sequence = segment.sequence
        used = -(-(sequence.length + segment.tokens) // sequence.block_size)
        runs = _runs(sequence.blocks[:used])
        words += (sequence.length, len(segment.pending), len(segment.nodes), int(segment.want_logits), len(runs))
        words += segment.pending
        words += segment.nodes
        words += segment.parents
        for run in runs:
            words += run
    return words


def kind_of(words: Sequence[int]) -> Kind:
    """Raises Internal for what is not a message of this version."""
    if len(words) < 2 or words[0] != MAGIC or words[1] not in list(Kind):
        raise _broken("it is not one of this version; start all ranks from the same code")
    return Kind(words[1])


def decode_step(words: Sequence[int], blocks: int, block_size: int) -> BroadcastStep:
    """The step of a message of kind STEP, for a pool of so many blocks. Raises Internal for nonsense."""
    reader = _Reader(words, 2)
    moves, segments = reader.take(2)
    rows = _pairs(reader.take(2 * moves))
    if not all(0 <= row < blocks * block_size for pair in rows for row in pair):
        raise _broken("a row is outside the pool")
    step = BroadcastStep(rows, [_segment(reader, blocks, block_size) for _ in range(segments)])
    if reader.left:
        raise _broken(f"{reader.left} words are left over")
    return step


class _Reader:
    def __init__(self, words: Sequence[int], at: int) -> None:
        self._words = words
        self._at = at

    @property
    def left(self) -> int:
        return len(self._words) - self._at

    def take(self, count: int) -> list[int]:
        if not 0 <= count <= self.left:
            raise _broken(f"it should have {count} more words and has {self.left}")
        self._at += count
        return list(self._words[self._at - count : self._at])


def _segment(reader: _Reader, blocks: int, block_size: int) -> Segment:
    length, pending, nodes, wanted, runs = reader.take(5)
    tokens = reader.take(pending), reader.take(nodes), reader.take(nodes)
    held: list[int] = []
    for first, count in _pairs(reader.take(2 * runs)):
        if not 0 <= first < first + count <= blocks:
            raise _broken("a block is outside the pool")
        held += range(first, first + count)
    if length < 0 or wanted not in (0, 1):
        raise _broken("a segment's head has impossible numbers")
    segment = Segment(KV(held, block_size, length=length), *tokens, want_logits=bool(wanted))
    try:
        segment.check()
    except SlipstreamError as error:
        raise _broken(error.message) from error
    return segment


def _runs(blocks: list[int]) -> list[list[int]]:
    """[first, count] of each contiguous run."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return runs


def _pairs(words: Iterable[int]) -> list[tuple[int, int]]:
    each = iter(words)
    return list(zip(each, each, strict=True))


def _broken(why: str) -> Internal:
    return Internal(f"A message of the group cannot be read: {why}.", reason="MESSAGE_BROKEN")
