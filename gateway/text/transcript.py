"""A session's output as its client sees it: tokens, the text that is final, and which tokens carry it.

The text ends before the first stop string, or behind it if the request says so, however tokens and deltas divide it.
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


class StopMatch:
    """Length of the part of one stop string that the text ends with (Knuth, Morris and Pratt 1977): a constant time for
    each character, however long the string is and whatever the text repeats."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Characters of `stop` that the text ends with."""
        self._shorter = [0]
        """For each length: the next shorter beginning of `stop` that a text which ends with that one ends with."""
        length = 0
        for char in stop[1:]:
            while length and stop[length] != char:
                length = self._shorter[length - 1]
            length += stop[length] == char
            self._shorter.append(length)

    def push(self, text: str) -> int:
        """The place in `text` behind which the string is complete for the first time; 0 where it is not."""
        stop, length, at = self.stop, self.length, 0
        while at < len(text):
            if not length and (at := text.find(stop[0], at)) < 0:
                break
            while length and stop[length] != text[at]:
                length = self._shorter[length - 1]
            length += stop[length] == text[at]
            at += 1
            if length == len(stop):
                return at
        self.length = length
        return 0


class StopStrings:
    """Holds back the end of the text while it may be the beginning of a stop string.

    The stop string that is complete first wins, of several the longest: a rule that does not depend on how the text
    arrived, so the same text ends at the same place whatever was drafted.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the text ends behind the stop string, not before it."""
        self._matches = [StopMatch(stop) for stop in stops]
        self._include = include
        self._held = ""

    def push(self, text: str) -> StopScan:
        ends = [(match.push(text), -len(match.stop), match.stop) for match in self._matches]
        found = [each for each in ends if each[0] > 0]
        held = self._held + text
        if found:
            end, size, stop = min(found)
            last = len(self._held) + end + (0 if self._include else size)
            self._held = ""
            return StopScan(held[:last], stop)
        keep = max((match.length for match in self._matches), default=0)
        self._held = held[len(held) - keep :]
        return StopScan(held[: len(held) - keep])

    def flush(self) -> str:
        """The text that was held back, once no more can follow."""
        held, self._held = self._held, ""
        return held


class Transcript:
    """Fed with output tokens in order; `stop` is set once a stop string ended the text.

    A token is settled once all of its text is final, or the beginning of it at the end of the output. So tokens are
    held back as their text is, and how many there are at a stop string depends on the text alone. The text that goes
    with the first tokens depends on them alone, too, and ends where theirs ends.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], shown: Shown = number_only, *, include_stop: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._shown_token = shown
        self._stops = StopStrings(stops, include=include_stop)
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
        """Number of leading tokens that carry the final text: all, unless a stop string ended it or may be about to.
        One at least where one did: the model wrote it."""
        if not self._stopping:
            return len(self._ends)
        if not self._shown:
            return 1 if self.stop else 0
        last = bisect_left(self._ends, self._shown)
        return last + 1 if self.stop or self._ends[last] == self._shown else last

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
        """The texts of the tokens that are settled from now on: of one that a stop string cuts all that is final."""
        count, texts = self.carrying(), []
        while self._settled < count:
            self._settled += 1
            end = len(self.rest) - max(0, self._shown - self._ends[self._settled - 1])
            texts.append(self.rest[:end])
            self.rest = self.rest[end:]
        return texts
