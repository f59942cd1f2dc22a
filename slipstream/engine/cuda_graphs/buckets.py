"""The sizes that steps are padded to, so that a graph captured once serves many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


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
