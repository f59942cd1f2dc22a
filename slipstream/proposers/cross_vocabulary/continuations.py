"""What a draft model says may come next at one place, string by string, as log q over the target's tokens.

A text that ends inside of what the drafter would have spelled with one token misleads it. So the last draft tokens are
taken back: what may come next is the sum over all draft tokens that spell the taken-back bytes and more (token healing;
the covers of a prefix of Vieira et al. 2024, arXiv 2412.03719, along one spelling). And a draft token may be only the
beginning of a target token: such strings are drafted on (string-level drafting, Timor et al. 2025, arXiv 2502.05202)
until the target's own tokenizer says which token they begin with.
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
"""[rows, draft tokens]: log q after each row of a session's pass."""

LIKELY = 256
"""Draft tokens after the whole text that count at all."""
PRECISE = 32
"""Strings whose target token is asked of the target's tokenizer; the others' is looked up."""
BRANCHED = 8
"""Draft tokens that a string is drafted on with."""
BRANCHES = 4
"""Strings that are drafted on in one pass."""
LEAST_SHARE = 0.02
"""Of the likeliest string's probability: less likely ones are not drafted on."""


@dataclass(frozen=True, slots=True)
class String:
    """Bytes that may come next. `row` and `token` name its last draft token in the session's pass."""

    weight: float
    """log q up to a constant."""
    data: bytes
    row: int
    token: int
    open: bool
    """Whether it may be the beginning of a longer target token."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The last draft tokens of a place: `tokens` after `rows[0]`, `rows[1]`, ...; the last row is after all of them."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]


class Continuations:
    """`last`: what the last target token spells."""

    def __init__(self, translation: Translation, last: bytes, ending: Ending) -> None:
        self._translation = translation
        self._last = last
        self._ending = ending
        self._strings: list[String] = []
        self._rest: list[tuple[float, int]] = []
        """(weight, target token) of what is not looked at string by string."""
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
        """The likeliest strings that should be drafted on; `grow` wants the rows after them."""
        best = sorted(self._strings, key=lambda string: -string.weight)
        least = (best[0].weight if best else 0.0) + math.log(LEAST_SHARE)
        likely = (string for string in best if string.open and string.weight >= least and self._token(string) >= 0)
        self._grown = list(itertools.islice(likely, BRANCHES))
        return self._grown

    def grow(self, logs: Logs, rows: Sequence[int]) -> None:
        """Puts what follows them in the place of the strings that `unfinished` named."""
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
        """[target tokens] float32, up to a constant; -inf for what the drafter has no word for."""
        weighed = [(string.weight, self._token(string)) for string in self._strings] + self._rest
        weighed = [(weight, token) for weight, token in weighed if token >= 0]
        row = np.full(self._translation.target.size, -np.inf, dtype=np.float32)
        if weighed:
            weights = np.array([weight for weight, _ in weighed])
            tokens = np.array([token for _, token in weighed])
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
