"""A draft model's distribution over the next strings, as log q over the target's tokens.

A text that ends inside of what the drafter would have spelled with one token misleads it. So the last draft tokens are
taken back, and the distribution sums over all draft tokens that spell the taken-back bytes and more (token healing; the
covers of a prefix of Vieira et al. 2024, arXiv 2412.03719, along one spelling). A draft token may also be only the
beginning of a target token: such strings are drafted on (string-level drafting, Timor et al. 2025, arXiv 2502.05202)
until the target's tokenizer determines the token that they begin with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.proposers.cross_vocabulary.translation import Translation

Logs = npt.NDArray[np.float32]
"""[rows, draft tokens]: log q after each row of a sequence's pass."""

LIKELY = 256
"""Draft tokens after the whole text that are considered."""
PRECISE = 32
"""Strings that the target's tokenizer encodes; the others' target token comes from a table."""
BRANCHED = 8
"""Draft tokens appended to a string that is drafted on."""
BRANCHES = 4
"""Strings that are drafted on in one pass."""
LEAST_SHARE = 0.02
"""Least probability, as a share of the likeliest string's, of a string that is drafted on."""


@dataclass(frozen=True, slots=True)
class String:
    """Bytes that may come next."""

    weight: float
    """log q up to a constant."""
    data: bytes
    row: int
    """Row of the sequence's pass after which its last draft token stands."""
    token: int
    open: bool
    """True for what may be the beginning of a longer target token."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The last draft tokens of a place, each after one of `rows`; the last row is after all of them."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]


class Continuations:
    def __init__(self, translation: Translation, last: bytes, ending: Ending) -> None:
        """`last`: bytes of the last target token."""
        self._translation = translation
        self._last = last
        self._ending = ending
        self._strings: list[String] = []
        self._rest: list[tuple[float, int]] = []
        """(weight, target token) of strings that are not kept."""
        self._grown: list[String] = []

    def begin(self, logs: Logs) -> None:
        """Reads the rows of the ending."""
        found: list[tuple[float, bytes, int, int]] = []
        taken = 0.0
        tokens, rows = self._ending.tokens, self._ending.rows
        for place, (token, row) in enumerate(zip(tokens, rows, strict=False)):
            cover = self._translation.draft.joined(tokens[place:])
            longer = self._translation.extensions(cover)
            found += [(taken + log, cover, row, index) for log, index in _best(logs[row], longer, PRECISE)]
            taken += float(logs[row, token])
        found += [(taken + log, b"", rows[-1], index) for log, index in _best(logs[rows[-1]], None, LIKELY)]
        found.sort(reverse=True)
        for rank, (weight, cover, row, index) in enumerate(found):
            word = self._translation.draft.word(index)
            if word and rank < PRECISE:
                data = word[len(cover) :]
                open_ended = self._translation.grows(data) if cover else bool(self._translation.begins[index])
                self._strings.append(String(weight, data, row, index, open_ended))
            elif not cover and index < len(self._translation.first):
                self._rest.append((weight, int(self._translation.first[index])))

    def unfinished(self) -> list[String]:
        """The likeliest strings to draft on; `grow` takes the rows after them."""
        best = sorted(self._strings, key=lambda string: -string.weight)
        least = (best[0].weight if best else 0.0) + math.log(LEAST_SHARE)
        likely = (string for string in best if string.open and string.weight >= least and self._token(string) >= 0)
        self._grown = list(itertools.islice(likely, BRANCHES))
        return self._grown

    def grow(self, logs: Logs, rows: Sequence[int]) -> None:
        """Replaces the strings of `unfinished` by their continuations."""
        for string, row in zip(self._grown, rows, strict=True):
            self._strings.remove(string)
            left = 1.0
            for log, index in _best(logs[row], None, BRANCHED):
                word = self._translation.draft.word(index)
                if word:
                    data = string.data + word
                    grown = String(string.weight + log, data, row, index, self._translation.grows(data))
                    self._strings.append(grown)
                    left -= math.exp(log)
            if left > 0.0:
                self._rest.append((string.weight + math.log(left), self._token(string)))
        self._grown = []

    def log_q(self) -> npt.NDArray[np.float32]:
        """[target tokens] float32, up to a constant; -inf for a token that no string begins with."""
        weighed = [(string.weight, self._token(string)) for string in self._strings] + self._rest
        weighed = [(weight, token) for weight, token in weighed if token >= 0]
        row = np.full(self._translation.target.size, -np.inf, dtype=np.float32)
        if weighed:
            weights, tokens = (np.array(column) for column in zip(*weighed, strict=True))
            top = weights.max()
            masses = np.bincount(tokens, np.exp(weights - top), minlength=len(row))
            row[tokens] = np.log(np.maximum(masses[tokens], 1e-300))
        return row

    def _token(self, string: String) -> int:
        return self._translation.follow(self._last, string.data)


def _best(logs: Logs, ids: npt.NDArray[np.int64] | None, count: int) -> list[tuple[float, int]]:
    """The `count` likeliest of the ids, or of all, with their logs."""
    values = logs if ids is None else logs[ids]
    kept = np.argpartition(values, -count)[-count:] if len(values) > count else np.arange(len(values))
    ids, values = kept if ids is None else ids[kept], values[kept]
    return list(zip(values.tolist(), ids.tolist(), strict=True))
