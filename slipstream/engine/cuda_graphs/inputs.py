"""The inputs of a padded step: one piece of device memory at a fixed address, filled by one copy.

Everything that differs from step to step is in it, so that a captured graph, which repeats the same operations on the
same addresses, computes the next step. All buckets share it; each works on the first tokens and chunks. A segment is
cut into *chunks* of at most `width` tokens; a chunk is one entry of attention's batch.

Who sees whom inside a segment. Its tokens are a tree: the pending chain is the trunk. In the order of a depth-first
walk a token's descendants stand right behind it, so with `enter` (its place in the walk) and `leave` (the place behind
its last descendant) token k is the query q itself or an ancestor of it iff enter[k] <= enter[q] < leave[k]: two numbers
a token, for trees of any size. The walks of a step's segments are one behind the other, so no token is an ancestor of
another segment's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import overwrite
from slipstream.engine.segment import Segment


class Bucket(NamedTuple):
    """Room of a padded step."""

    tokens: int
    """Rows of everything but attention: each token once, whatever segment it is of."""
    chunks: int
    """Rows of attention's batch: pieces of segments, each of `Buckets.width` tokens at most."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Powers of two up to `most_tokens`. A step above it is not padded: it takes the device's time, not the host's."""

    width: int
    """Tokens of a chunk at most."""
    most_tokens: int = 256

    def __post_init__(self) -> None:
        if self.most_tokens != _above(self.most_tokens):
            raise ValueError(f"buckets end at a power of two, not at {self.most_tokens}")

    def find(self, counts: list[int]) -> Bucket | None:
        """The smallest bucket for segments of so many tokens; None if they are too many."""
        tokens = sum(counts)
        if tokens > self.most_tokens:
            return None
        chunks = sum(-(-count // self.width) for count in counts)
        return Bucket(_above(tokens), _above(chunks))

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket that `find` may name, those of most tokens first."""
        tokens = _above(self.most_tokens + 1) // 2
        while tokens:
            fewest = -(-(tokens // 2 + 1) // self.width)
            chunks = _above(fewest)
            while chunks <= tokens:
                yield Bucket(tokens, chunks)
                chunks *= 2
            tokens //= 2


def _above(count: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (count - 1).bit_length()


_LONG = ("tokens", "positions", "rows", "wanted", "place")
_SHORT = ("enter", "leave", "base", "start", "first", "least", "offset", "blocks")


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool as the padded plan sees it: the engine's blocks, and one behind them that padding writes to."""

    blocks: int
    block_size: int
    longest: int
    """Blocks of one sequence that a step may read."""
    max_length: int
    """Positions that the model knows."""

    @property
    def trash(self) -> int:
        """The block behind the last one."""
        return self.blocks

    @property
    def rows(self) -> int:
        return (self.blocks + 1) * self.block_size


class Inputs:
    """Views of the device's memory for `most` tokens, and so for `most` chunks. Padding tokens are copies of token id 0
    that write to the trash block and that nobody sees; padding chunks read no block.

    int64 [most]: tokens, positions (below the model's length), rows (of the pool, where keys and values go), wanted
                  (tokens whose logits are asked for), place (chunk * width + place in it)
    int32 [most]: of tokens enter and leave; of chunks base (the segment's first slot), start (its first token), first
                  (the chunk's first token), least (the smallest position in it), offset (of its sequence in `table`),
                  blocks (how many of them it reads)
    int32 [most * longest]: table, the blocks of all sequences, one sequence after the other
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    wanted: Tensor
    place: Tensor
    enter: Tensor
    leave: Tensor
    base: Tensor
    start: Tensor
    first: Tensor
    least: Tensor
    offset: Tensor
    blocks: Tensor
    table: Tensor

    def __init__(self, most: int, width: int, pool: Pool, device: torch.device) -> None:
        self.most, self.width, self.pool = most, width, pool
        self._head = most * (2 * len(_LONG) + len(_SHORT))
        self._host = np.zeros(self._head, np.int32)
        self._memory = torch.zeros(self._head + most * pool.longest, dtype=torch.int32, device=device)
        self.table = self._memory[self._head :]
        self._long: dict[str, npt.NDArray[np.int64]] = {}
        self._short: dict[str, npt.NDArray[np.int32]] = {}
        for at, name in enumerate(_LONG):
            part = slice(2 * most * at, 2 * most * (at + 1))
            self._long[name] = self._host[part].view(np.int64)
            setattr(self, name, self._memory[part].view(torch.int64))
        for at, name in enumerate(_SHORT, start=2 * len(_LONG)):
            part = slice(most * at, most * (at + 1))
            self._short[name] = self._host[part]
            setattr(self, name, self._memory[part])
        self._trash = pool.trash * pool.block_size + np.arange(most, dtype=np.int64) % pool.block_size
        self.fill([])

    def fill(self, segments: list[Segment]) -> int:
        """Takes over a step; the number of logits rows it wants."""
        self._host.fill(0)
        self._long["rows"][:] = self._trash
        tables: list[npt.NDArray[np.int32]] = []
        token = chunk = wanted = offset = 0
        for segment in segments:
            table = self._listed(segment)
            depth = np.array(segment.depths(), np.int64)
            self._tokens(segment, token, depth)
            self._chunks(segment, (token, chunk, offset), depth)
            if segment.want_logits:
                rows = range(token + len(segment.pending) - 1, token + segment.tokens)
                self._long["wanted"][wanted : wanted + len(rows)] = rows
                wanted += len(rows)
            tables.append(table)
            token, chunk, offset = token + segment.tokens, chunk - (-segment.tokens // self.width), offset + len(table)
        whole = torch.from_numpy(np.concatenate([self._host, *tables]))
        overwrite(self._memory[: len(whole)], whole)
        return wanted

    def _tokens(self, segment: Segment, token: int, depth: npt.NDArray[np.int64]) -> None:
        base, n = segment.sequence.length, segment.tokens
        own = slice(token, token + n)
        fields = self._long
        fields["tokens"][own] = [*segment.pending, *segment.nodes]
        fields["positions"][own] = np.minimum(base + depth, self.pool.max_length - 1)
        fields["rows"][own] = segment.sequence.pool_rows(base, base + n)
        enter, leave = walk(segment)
        self._short["enter"][own], self._short["leave"][own] = token + enter, token + leave

    def _chunks(self, segment: Segment, at: tuple[int, int, int], depth: npt.NDArray[np.int64]) -> None:
        """at: the segment's first token, its first chunk, its offset in the table."""
        token, chunk, offset = at
        base, n, width = segment.sequence.length, segment.tokens, self.width
        within = np.arange(n)
        self._long["place"][token : token + n] = (chunk + within // width) * width + within % width
        firsts = np.arange(0, n, width)
        own = slice(chunk, chunk + len(firsts))
        fields = self._short
        fields["base"][own], fields["start"][own], fields["offset"][own] = base, token, offset
        fields["first"][own] = token + firsts
        fields["least"][own] = base + np.minimum.reduceat(depth, firsts)
        last = np.minimum(firsts + width, n)  # nobody sees a token behind itself
        fields["blocks"][own] = -(-(base + last) // self.pool.block_size)

    def _listed(self, segment: Segment) -> npt.NDArray[np.int32]:
        """The blocks that the segment reads and writes."""
        count = -(-(segment.sequence.length + segment.tokens) // self.pool.block_size)
        return segment.sequence.table[:count]


def walk(segment: Segment) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(enter, leave) of every token of the segment, pending ones first, in a depth-first walk of its tree."""
    pending, n = len(segment.pending), segment.tokens
    above = [*range(-1, pending - 1), *(pending + parent for parent in segment.parents)]
    sizes = [1] * n
    for token in range(n - 1, 0, -1):
        sizes[above[token]] += sizes[token]
    enter = [0] * n
    taken = [1] * n  # of each subtree: itself, then what its earlier children take
    for token in range(1, n):
        parent = above[token]
        enter[token] = enter[parent] + taken[parent]
        taken[parent] += sizes[token]
    first, size = np.array(enter, np.int32), np.array(sizes, np.int32)
    return first, first + size
