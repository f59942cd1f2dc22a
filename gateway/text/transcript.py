"""A session's output as its client sees it: tokens, the text that is final, and which tokens carry it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopScan, StopStrings
from slipstream.v1 import gateway_pb2, types_pb2

Shown = Callable[[int], gateway_pb2.TokenText]
"""What can be said of a single token."""


def number_only(token: int) -> gateway_pb2.TokenText:
    return gateway_pb2.TokenText(token_id=token)


class Transcript:
    """Fed with output tokens in order; `stop` is set once a stop string ended the text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], shown: Shown = number_only) -> None:
        self._detokenizer = detokenizer
        self._shown_token = shown
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

    def likelihoods(self, tokens: Sequence[int], told: Sequence[types_pb2.TokenLogprobs]) -> list[gateway_pb2.Logprob]:
        """What the verifier said of these tokens, with their words, and perhaps of more behind them, which were cut;
        nothing where it was not asked."""
        return [self._likelihood(token, each) for token, each in zip(tokens, told, strict=False)]

    def _likelihood(self, token: int, told: types_pb2.TokenLogprobs) -> gateway_pb2.Logprob:
        top = [
            gateway_pb2.TopLogprob(token=self._shown_token(other), logprob=logprob)
            for other, logprob in zip(told.top_token_ids, told.top_logprobs, strict=True)
        ]
        return gateway_pb2.Logprob(token=self._shown_token(token), logprob=told.logprob, top=top)

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
        scan: StopScan = self._stops.push(text)
        self.stop = scan.stop
        return self._show(scan.text)

    def _show(self, text: str) -> str:
        self._shown += len(text)
        return text
