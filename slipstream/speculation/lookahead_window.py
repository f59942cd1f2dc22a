"""Lookahead decoding: the target guesses several tokens ahead in its own passes (Fu et al. 2024, arXiv 2402.02057).

A window of guesses runs along in each pass behind the last committed token, and every row makes its next token anew
from those before it: a Jacobi iteration. What the iterations of one column spell are n-grams that the target itself
finds likely; they are kept in a pool, and proposed where their first token comes.

The window has N - 1 levels of W columns. Column i of level l stands for the token l + i places behind the last
committed one, and is one iteration newer than level l - 1. In the pass a row sees the committed text, level 0 up to its
column, and its own column above it. That is a candidate tree: level 0 is a chain, from each of whose nodes one column
hangs. So engines need nothing for it, and no acceptance rule looks at its rows. Greedy guesses: texts do not change.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.errors import InvalidArgument

MOST_KEYS = 8192
"""First tokens whose n-grams one sequence's pool keeps."""
FIRST_GAIN = 0.05
"""Tokens that a row of the window is believed to bring before it was measured."""
FORGET = 0.98
"""Factor by which each round reduces the weight of the rounds before it."""
REST, TRIAL = 32, 8
"""Rounds for which a window that does not pay rests, and then runs again to be measured."""

Gram = tuple[int, ...]


class LookaheadSize(NamedTuple):
    """W, N and G of the paper."""

    width: int
    """Columns of the window."""
    gram: int
    """Tokens of an n-gram, its first one included."""
    guesses: int
    """N-grams that are kept for one first token."""

    @classmethod
    def parse(cls, text: str) -> LookaheadSize:
        """From `W,N,G`. Raises InvalidArgument for anything else and for a size that no window has."""
        numbers = text.split(",")
        if len(numbers) != 3 or not all(each.strip().isdecimal() for each in numbers):
            raise InvalidArgument(f"The lookahead window is {text!r}; give W,N,G as 4,3,3.")
        size = cls(*map(int, numbers))
        if not (1 <= size.width <= 64 and 2 <= size.gram <= 16 and 1 <= size.guesses <= 64):
            raise InvalidArgument(f"The lookahead window is {text!r}; W and G are 1 to 64, N is 2 to 16.")
        return size


class WindowRows(NamedTuple):
    """Rows of a window in one pass: a tree below the last committed token, parents before children."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Index of each row's parent, or -1 for the last committed token."""
    newest: tuple[int, ...] = ()
    """The rows, or -1, whose likeliest next token goes back to the window: its newest level."""

    def __len__(self) -> int:
        return len(self.token_ids)


class NgramPool:
    """N-grams of one sequence by their first token, the latest last. Counts how often each came."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._found: OrderedDict[int, OrderedDict[Gram, int]] = OrderedDict()

    def add(self, first: int, gram: Gram) -> None:
        grams = self._found.setdefault(first, OrderedDict())
        grams[gram] = grams.get(gram, 0) + 1
        grams.move_to_end(gram)
        if len(grams) > self._guesses:
            grams.popitem(last=False)
        self._found.move_to_end(first)
        if len(self._found) > MOST_KEYS:
            self._found.popitem(last=False)

    def after(self, first: int) -> list[tuple[Gram, int]]:
        """Grams that followed the token, the latest first, with their counts."""
        return list(reversed(self._found.get(first, {}).items()))


@dataclass(slots=True)
class LookaheadWindow:
    """One sequence's window, of a proposer inside a verifier. Lives on the verifier's event loop."""

    size: LookaheadSize
    tokens: list[int]
    """The sequence's committed tokens; what fills empty places of the window is drawn from them."""
    ends: frozenset[int]
    """Tokens that end a text: nothing is guessed behind them."""
    pool: NgramPool
    found: NgramPool = field(init=False)
    """The n-grams that the window found, alone: what its rows are worth is measured on them."""
    levels: list[list[int]] = field(init=False)
    passes: int = 0
    """Passes of the window; its first n-grams are whole after N - 2."""
    rounds: int = 0
    gained: float = field(init=False)
    rows_run: float = field(init=False)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.found = NgramPool(self.size.guesses)
        self.levels = [self._filled([]) for _ in range(self.size.gram - 1)]
        self.rows_run = 8.0 * self.most_rows
        self.gained = FIRST_GAIN * self.rows_run

    @property
    def most_rows(self) -> int:
        return (self.size.gram - 1) * self.size.width - 1

    @property
    def gain(self) -> float:
        """Tokens that one row brings, as measured."""
        return self.gained / self.rows_run

    def rows(self, room: int, price: float) -> WindowRows:
        """Chooses the rows of the next pass, within `room` rows that cost `price` tokens each: whole columns, none
        where they do not pay."""
        depth = self.size.gram - 1
        width = min(self.size.width, (room + 1) // depth)
        if width * depth <= 1 or (self.gain < price and self.rounds % (REST + TRIAL) < REST):
            return WindowRows()
        tokens, parents = self.levels[0][1:width], list(range(-1, width - 2))
        above = list(range(-1, width - 1))
        for level in self.levels[1:]:
            first = len(tokens)
            tokens += level[:width]
            parents += above
            above = list(range(first, first + width))
        return WindowRows(tuple(tokens), tuple(parents), tuple(above))

    def advance(self, newest: Sequence[int], rows: int, committed: Sequence[int]) -> None:
        """After a round: the likeliest tokens behind the newest level's rows (none where the window did not run; -1
        where the target's numbers were broken), the rows that ran, and the tokens that were committed."""
        self._measure(rows, committed)
        self.rounds += 1
        drop = len(committed) - (1 if newest else 0)  # a level's next iteration stands one place further right
        if newest:
            columns = [[self.tokens[-1 - len(committed)], *self.levels[0][1 : len(newest)]]]
            columns += [level[: len(newest)] for level in self.levels[1:]]
            self.passes += 1
            if self.passes > self.size.gram - 2:
                for first, *gram in zip(*columns, newest, strict=True):
                    if min(first, *gram) >= 0:
                        self.pool.add(first, tuple(gram))
                        self.found.add(first, tuple(gram))
            self.levels = [*columns[1:], list(newest)]
        self.levels = [self._filled(level[drop:]) for level in self.levels]

    def _filled(self, level: list[int]) -> list[int]:
        """The level with a token of the text in every place that has none."""
        level = [self._some() if token < 0 or token in self.ends else token for token in level]
        return level + [self._some() for _ in range(self.size.width - len(level))]

    def _some(self) -> int:
        return self._random.choice(self.tokens)

    def _measure(self, rows: int, committed: Sequence[int]) -> None:
        """Counts the accepted tokens that an n-gram of the window's foretold."""
        accepted, first = committed[:-1], self.tokens[-1 - len(committed)]
        best = max((_common(gram, accepted) for gram, _ in self.found.after(first)), default=0)
        if rows or best:
            self.gained = self.gained * FORGET + best
            self.rows_run = self.rows_run * FORGET + rows


def _common(gram: Sequence[int], tokens: Sequence[int]) -> int:
    count = 0
    for one, other in zip(gram, tokens, strict=False):
        if one != other:
            break
        count += 1
    return count
