"""Batches of token windows, a pure function of (seed, step), so that a resumed run sees the same data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from slipstream.errors import InvalidArgument
from training.corpus import Document
from training.vocabulary import END_OF_TEXT_ID


def encode_stream(tokenizer: Tokenizer, documents: Iterable[Document], seed: int) -> npt.NDArray[np.int64]:
    """All documents in an order fixed by `seed`, each followed by the end-of-text token: int64 [tokens]."""
    shuffled = list(documents)
    np.random.default_rng(seed).shuffle(shuffled)
    pieces: list[int] = [END_OF_TEXT_ID]
    for encoding in tokenizer.encode_batch([document.text for document in shuffled]):
        pieces.extend(encoding.ids)
        pieces.append(END_OF_TEXT_ID)
    return np.asarray(pieces, dtype=np.int64)


@dataclass(frozen=True)
class Windows:
    """Cuts a stream into windows of `length` inputs plus one shifted target; every epoch cuts elsewhere.

    Windows start anywhere in a file, so a prompt taken from the middle of a file is a natural one.
    """

    stream: npt.NDArray[np.int64]
    length: int
    rows: int
    seed: int

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            raise InvalidArgument(
                f"The corpus has {len(self.stream)} tokens, less than one window of {self.length}; give more files."
            )

    @property
    def per_epoch(self) -> int:
        """Windows until every token was seen once; one length is kept free for the shift."""
        return (len(self.stream) - self.length - 1) // self.length

    def batch(self, step: int) -> torch.Tensor:
        """Tokens int64 [rows, length + 1] of one step."""
        picks = range(step * self.rows, (step + 1) * self.rows)
        return torch.from_numpy(np.stack([self._window(*divmod(pick, self.per_epoch)) for pick in picks]))

    def _window(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng((self.seed, epoch))
        shift = int(random.integers(self.length))
        start = shift + int(random.permutation(self.per_epoch)[index]) * self.length
        return self.stream[start : start + self.length + 1]
