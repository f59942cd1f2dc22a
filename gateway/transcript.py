"""A session's output as its client sees it: tokens, the text that is final, and which tokens carry it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.stops import Scan, StopStrings


class Transcript:
    """Fed with output tokens in order; `stop` is set once a stop string ended the text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._ends: list[int] = []
        """Characters that were there after each token."""
        self._shown = 0
        """Characters given out."""
        self.stop = ""

    def __len__(self) -> int:
        """Output tokens, those behind a stop string included."""
        return len(self._ends)

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became final. Nothing after a stop string."""
        return "".join(self._advance(self._detokenizer.push(token)) for token in tokens)

    def finish(self) -> str:
        """The text that was held back; no more tokens follow."""
        if self.stop:
            return ""
        text = self._text(self._detokenizer.flush())
        return text if self.stop else text + self._show(self._stops.flush())

    def carrying(self) -> int:
        """How many leading tokens carry the final text: all, unless a stop string ended it."""
        if not self.stop:
            return len(self._ends)
        return bisect_left(self._ends, self._shown) + 1 if self._shown else 0

    def _advance(self, text: str) -> str:
        self._ends.append(self._ends[-1] if self._ends else 0)
        return "" if self.stop else self._text(text)

    def _text(self, text: str) -> str:
        if self._ends:
            self._ends[-1] += len(text)
        scan: Scan = self._stops.push(text)
        self.stop = scan.stop
        return self._show(scan.text)

    def _show(self, text: str) -> str:
        self._shown += len(text)
        return text
