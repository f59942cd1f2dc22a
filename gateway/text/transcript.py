"""A session's output as its client sees it: tokens, the text that is final, and which tokens carry it.

The text ends before the first stop string, however tokens and deltas divide it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gateway.text.detokenizer import Detokenizer
from slipstream.v1 import gateway_pb2, types_pb2

Shown = Callable[[int], gateway_pb2.TokenText]
"""A token id -> its text and bytes."""


def number_only(token: int) -> gateway_pb2.TokenText:
    return gateway_pb2.TokenText(token_id=token)


@dataclass(frozen=True, slots=True)
class StopScan:
    """Text that became final, and the stop string that ended it; empty if none did."""

    text: str
    stop: str = ""


class StopStrings:
    """Holds back the end of the text while it may be the beginning of a stop string.

    The stop string that is complete first wins, of several the longest: a rule that does not depend on how the text
    arrived, so the same text ends at the same place whatever was drafted.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopScan:
        held = self._held + text
        # The first occurrence of a string is also the one that ends first.
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return StopScan(held[:start], stop)
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return StopScan(held[: len(held) - keep])

    def flush(self) -> str:
        """The text that was held back, once no more can follow."""
        held, self._held = self._held, ""
        return held


class Transcript:
    """Fed with output tokens in order; `stop` is set once a stop string ended the text.

    A token is settled once it is known to belong to the output: its text, or the beginning of it, is final. So tokens
    are held back as their text is, and how many there are at a stop string depends on the text alone. The text that
    goes with the first tokens depends on them alone, too.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], shown: Shown = number_only) -> None:
        self._detokenizer = detokenizer
        self._shown_token = shown
        self._stops = StopStrings(stops)
        self._stopping = bool(stops)
        """Whether a stop string may yet cut tokens off."""
        self._ends: list[int] = []
        """Characters of text up to and including each token."""
        self._shown = 0
        """Characters that are final."""
        self._settled = 0
        self.rest = ""
        """Text that is final and goes with no settled token so far."""
        self.stop = ""

    def __len__(self) -> int:
        """Number of output tokens, those behind a stop string included."""
        return len(self._ends)

    def push(self, tokens: Sequence[int]) -> list[str]:
        """The texts of the tokens that these settle, in order. Nothing after a stop string."""
        texts = list(map(self._detokenizer.push, tokens))
        if self._stopping:
            return [settled for text in texts for settled in self._advance(text)]
        self._ends += list(accumulate(map(len, texts), initial=self._shown))[1:]
        if texts:
            self._shown, self._settled = self._ends[-1], len(self._ends)
        return texts

    def likelihoods(
        self, tokens: Sequence[int], received: Sequence[types_pb2.TokenLogprobs]
    ) -> list[gateway_pb2.Logprob]:
        """The log-probabilities of these tokens, with their texts. `received` may hold more, for tokens that were
        cut off behind them; it is empty where none were requested."""
        return [self._likelihood(token, each) for token, each in zip(tokens, received, strict=False)]

    def _likelihood(self, token: int, received: types_pb2.TokenLogprobs) -> gateway_pb2.Logprob:
        top = [
            gateway_pb2.TopLogprob(token=self._shown_token(other), logprob=logprob)
            for other, logprob in zip(received.top_token_ids, received.top_logprobs, strict=True)
        ]
        return gateway_pb2.Logprob(token=self._shown_token(token), logprob=received.logprob, top=top)

    def finish(self) -> list[str]:
        """The texts of the tokens that were held back; no more tokens follow."""
        if self.stop:
            return []
        self._text(self._detokenizer.flush())
        if not self.stop:
            self._show(self._stops.flush())
            self._stopping = False
        return self._settle()

    def carrying(self) -> int:
        """How many leading tokens carry the final text: all, unless a stop string ended it or may be about to. One at
        least where one did: the model wrote it."""
        if not self._stopping:
            return len(self._ends)
        if not self._shown:
            return 1 if self.stop else 0
        return bisect_left(self._ends, self._shown) + 1

    def _advance(self, text: str) -> list[str]:
        self._ends.append(self._ends[-1] if self._ends else 0)
        if self.stop:
            return []
        self._text(text)
        return self._settle()

    def _text(self, text: str) -> None:
        if self._ends:
            self._ends[-1] += len(text)
        scan: StopScan = self._stops.push(text)
        self.stop = scan.stop
        self._show(scan.text)

    def _show(self, text: str) -> None:
        self._shown += len(text)
        self.rest += text

    def _settle(self) -> list[str]:
        """The texts of the tokens that are settled from now on: of the last one all that is final."""
        count, texts = self.carrying(), []
        while self._settled < count:
            self._settled += 1
            later = 0 if self._settled == count else self._shown - self._ends[self._settled - 1]
            end = len(self.rest) - later
            texts.append(self.rest[:end])
            self.rest = self.rest[end:]
        return texts


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
