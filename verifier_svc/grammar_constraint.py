"""A session's grammar on the verifier: what may follow its tokens, and which candidates can follow them at all."""

from __future__ import annotations

from slipstream.errors import CONTROL_FLOW
from slipstream.tokenizer.grammar import Cursor, Grammar, Mask

MOST_FAILURES = 8
"""Most candidates of one session on which the library may give up: each makes it start again at the beginning."""


class GrammarConstraint:
    """Two places in one grammar: the model's thread asks while it judges, the event loop while it grafts, and neither
    waits for the other."""

    def __init__(self, grammar: Grammar, tokens: list[int], prompt_length: int, *, drawn: bool) -> None:
        """`tokens` is the session's own list, whose end after `prompt_length` is the output; it does not change during
        a step. `drawn`: candidates are judged by a ratio rule."""
        self._grammar = grammar
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._drawn = drawn
        self._judging: Cursor = grammar.cursor()
        self._grafting: Cursor = grammar.cursor()
        self._failures = 0

    def after(self, path: tuple[int, ...]) -> Mask | None:
        """What may follow the committed tokens and this path. Raises FailedPrecondition where that cannot be said."""
        return self._judging.mask(self._output(path))

    def beside(self, tokens: list[int]) -> GrammarConstraint:
        """A constraint with this grammar along another list of tokens, for candidates that are judged apart."""
        return GrammarConstraint(self._grammar, tokens, self._prompt_length, drawn=self._drawn)

    def admits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a candidate has a place in the tree below this path.

        One that is forbidden has none. Under the ratio rule it must have: that it was drawn is part of the law of what
        takes its place, so it is judged, with p = 0. But nothing is admitted below it."""
        if not self._drawn:
            return self._allows(path, token)
        return not path or self._allows(path[:-1], path[-1])

    def _allows(self, path: tuple[int, ...], token: int) -> bool:
        if self._failures >= MOST_FAILURES:
            return False
        try:
            return self._grafting.allows(self._output(path), token)
        except CONTROL_FLOW:
            raise
        except BaseException:  # a candidate must not end the session: only what is chosen can
            self._failures += 1
            return False

    def _output(self, path: tuple[int, ...]) -> list[int]:
        return [*self._tokens[self._prompt_length :], *path]
