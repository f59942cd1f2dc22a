"""Count of the reasoning tokens of an output, kept as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.text.answers import harmony
from gateway.text.answers.formats import HARMONY, THOUGHTS, AnswerFormat
from gateway.text.detokenizer import TokenDecoder

_SPACE_TOKENS = 4
"""Tokens of space at most before the mark that begins reasoning."""


class ReasoningTokens:
    """Counts tokens between the marks, which are no reasoning themselves; none where a mark is not a single token."""

    def __init__(self, format: AnswerFormat, decoder: TokenDecoder, *, opened: bool) -> None:
        """`opened`: the prompt ends within reasoning."""
        self.count = 0
        self._decoder = decoder
        self._inside = opened
        self._read = 0
        self._header: list[int] | None = None
        """Tokens of the open header of a message of gpt-oss."""
        self._step: Callable[[int], None] = lambda token: None
        token = decoder.control_token
        if format.thoughts == HARMONY:
            self._begins = {token(harmony.START), token(harmony.CHANNEL)}
            self._ends = {token(harmony.END), token(harmony.CALL), token(harmony.RETURN)}
            self._message = token(harmony.MESSAGE)
            self._step = self._in_messages
        elif thoughts := THOUGHTS.get(format.thoughts):
            self._begin, self._end = token(thoughts.begin), token(thoughts.end)
            self._step = self._between if self._end is not None else self._step

    def add(self, tokens: Sequence[int]) -> None:
        """The next tokens of the output."""
        for token in tokens:
            self._step(token)
            self._read += 1

    def _between(self, token: int) -> None:
        if token == self._end:
            self._step = lambda token: None  # there is no more of it
        elif self._inside and token != self._begin:
            self.count += 1
        elif token == self._begin and self._read <= _SPACE_TOKENS:
            self._inside = True

    def _in_messages(self, token: int) -> None:
        if token in self._begins:
            self._inside, self._header = False, self._header or []
        elif token in self._ends:
            self._inside, self._header = False, None
        elif self._header is not None and token == self._message:
            header, self._header = self._decoder.whole(self._header), None
            self._inside = "analysis" in header and "to=functions." not in header
        elif self._header is not None:
            self._header.append(token)
        elif self._inside:
            self.count += 1
