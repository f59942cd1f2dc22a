"""Tokens that a session's own tokens forbid behind them: its stop tokens before its least length, the last token of a
bad word behind its others, and reasoning beyond its limit.

It stands where a grammar would, as a mask at each node of the candidate tree by the path to that node: the text is the
same whatever is proposed, on every executor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.tokenizer.grammar import Mask


@dataclass(frozen=True, slots=True)
class ReasoningBound:
    """Most tokens between two marks."""

    max_tokens: int
    """0 or more."""
    begin: int
    """The token that begins reasoning."""
    end: int


@dataclass(frozen=True, slots=True)
class TokenRules:
    vocabulary_size: int
    min_length: int = 0
    """Tokens of prompt and output before which no stop token is allowed."""
    stop_token_ids: Collection[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    reasoning: ReasoningBound | None = None

    def bind(self, length: int) -> bool:
        """Whether they forbid anything behind so many tokens, or later."""
        return self.min_length > length or bool(self.bad_words) or self.reasoning is not None


class TokenConstraint:
    def __init__(self, rules: TokenRules, tokens: list[int], prompt_length: int, *, drawn: bool) -> None:
        """`tokens` is the session's own list, which does not change during a step. `drawn`: candidates are judged by a
        ratio rule."""
        self._rules = rules
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._drawn = drawn
        self._longest = max(map(len, rules.bad_words), default=1)
        self._last: tuple[frozenset[int], Mask] | None = None
        """The mask that was made last, and the tokens that it forbids: the next one is mostly the same."""
        self._reasoned = None if rules.reasoning is None else _Reasoned(rules.reasoning, tokens, prompt_length)

    def after(self, path: tuple[int, ...]) -> Mask | None:
        """Returns the tokens that may follow the committed tokens and this path; None where all may."""
        if self._reasoned is not None and self._reasoned.spent(path):  # min_length does not count there
            return self._reasoned.mask(self._rules.vocabulary_size)
        barred = self._barred(path)
        if not barred:
            return None
        if self._last is None or self._last[0] != barred:
            self._last = barred, _mask(self._rules.vocabulary_size, barred, inverted=True)
        return self._last[1]

    @property
    def failure(self) -> None:
        """It computes nothing that could fail."""

    @property
    def ready(self) -> bool:
        return True

    def worth_waiting_s(self) -> float:
        return 0.0

    def commit(self, token_ids: Sequence[int]) -> None:
        """The session's own list has them already."""
        if self._reasoned is not None:
            self._reasoned.read(token_ids)

    def close(self) -> None:
        """Nothing is computed for it."""

    def beside(self, tokens: list[int], prompt_length: int, settled: Callable[[], object]) -> TokenConstraint:
        return TokenConstraint(self._rules, tokens, prompt_length, drawn=self._drawn)

    def admits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a candidate has a place in the tree below this path. Under a ratio rule one that is forbidden has,
        because its being drawn is part of the law of what takes its place; but nothing has one below it."""
        if not self._drawn:
            return self._allows(path, token)
        return not path or self._allows(path[:-1], path[-1])

    def _allows(self, path: tuple[int, ...], token: int) -> bool:
        if self._reasoned is not None and self._reasoned.spent(path):
            return token == self._reasoned.end
        return token not in self._barred(path)

    def _barred(self, path: tuple[int, ...]) -> frozenset[int]:
        rules = self._rules
        barred = set[int]()
        if len(self._tokens) + len(path) < rules.min_length:
            barred.update(rules.stop_token_ids)
        if rules.bad_words:
            tail = self._tail(path)
            for *begin, last in rules.bad_words:
                if not begin or tail[-len(begin) :] == begin:
                    barred.add(last)
        return frozenset(barred)

    def _tail(self, path: tuple[int, ...]) -> list[int]:
        """The last tokens of the output and the path, as many as the longest word has before its last."""
        most = self._longest - 1
        first = max(self._prompt_length, len(self._tokens) - max(0, most - len(path)))
        return [*self._tokens[first:], *path[max(0, len(path) - most) :]]


class _Reasoned:
    """Where an output's reasoning stands."""

    def __init__(self, bound: ReasoningBound, tokens: Sequence[int], prompt_length: int) -> None:
        self._bound = bound
        self.end = bound.end
        self._alone: Mask | None = None
        marks = [token for token in tokens[:prompt_length] if token in (bound.begin, bound.end)]
        self._state: int | None = 0 if marks[-1:] == [bound.begin] else -1
        """Tokens between the marks so far; -1 before the first mark, None behind the last."""
        self.read(tokens[prompt_length:])

    def read(self, tokens: Sequence[int]) -> None:
        """These are committed."""
        self._state = self._behind(tokens)

    def spent(self, path: Sequence[int]) -> bool:
        """Whether the end mark alone may follow the committed tokens and these."""
        state = self._behind(path)
        return state is not None and state >= self._bound.max_tokens

    def mask(self, vocabulary_size: int) -> Mask:
        """The end mark alone."""
        if self._alone is None:
            self._alone = _mask(vocabulary_size, [self._bound.end], inverted=False)
        return self._alone

    def _behind(self, tokens: Sequence[int]) -> int | None:
        state = self._state
        for token in tokens:
            if state is None:
                break
            if token == self._bound.end:
                state = None
            elif state >= 0:
                state += 1
            elif token == self._bound.begin:
                state = 0
        return state


def _mask(vocabulary_size: int, tokens: Collection[int], *, inverted: bool) -> Mask:
    """These tokens' bits, or all others'."""
    chosen = np.full(vocabulary_size, inverted)
    chosen[list(tokens)] = not inverted
    return np.packbits(chosen, bitorder="little")
