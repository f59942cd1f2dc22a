"""A session's least length on the verifier: before it, no stop token can be chosen.

It stands where a grammar would, as masks at each node of the tree by the node's own depth: the text is the same
whatever is proposed.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from slipstream.tokenizer.grammar import Mask


class MinLengthConstraint:
    def __init__(
        self, tokens: list[int], min_length: int, stop_token_ids: Collection[int], vocabulary_size: int, *, drawn: bool
    ) -> None:
        """`tokens` is the session's own list, which does not change during a step. `min_length`: tokens of prompt and
        output. `drawn`: candidates are judged by a ratio rule."""
        self._tokens = tokens
        self._min_length = min_length
        self._stops = frozenset(stop_token_ids)
        self._vocabulary_size = vocabulary_size
        self._drawn = drawn
        allowed = np.ones(vocabulary_size, bool)
        allowed[list(self._stops)] = False
        self._mask: Mask = np.packbits(allowed, bitorder="little")

    def after(self, path: tuple[int, ...]) -> Mask | None:
        """What may follow the committed tokens and this path; None where everything may."""
        return self._mask if self._before_end(path) else None

    def beside(self, tokens: list[int]) -> MinLengthConstraint:
        """A constraint of equal length along another list of tokens, for candidates that are judged apart."""
        return MinLengthConstraint(tokens, self._min_length, self._stops, self._vocabulary_size, drawn=self._drawn)

    def admits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a candidate has a place in the tree below this path. Under a ratio rule one that is forbidden has,
        because its being drawn is part of the law of what takes its place; but nothing has one below it."""
        if not self._drawn:
            return self._allows(path, token)
        return not path or self._allows(path[:-1], path[-1])

    def _allows(self, path: tuple[int, ...], token: int) -> bool:
        return token not in self._stops or not self._before_end(path)

    def _before_end(self, path: tuple[int, ...]) -> bool:
        return len(self._tokens) + len(path) < self._min_length
