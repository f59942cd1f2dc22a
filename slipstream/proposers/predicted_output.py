"""Guess from a text that the client expects: where the output stands in it, and what stands there next.

A known text that is edited comes back with few changes, so its next tokens are guessed as they stand. After a
difference the place is found again as a reader finds it: the last few tokens, nearest to where the texts went together.
Decoding guided by a text that is nearly the output: Sun et al. 2021, arXiv 2106.04970.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.proposers.base import OpenedProposer, ProposerSettings, any_vocabulary
from slipstream.proposers.lookup import FoundNode, LookupProposer
from slipstream.tokenizer.vocabulary import common_prefix

GRAM = 4
"""Tokens by which a place is found anywhere; so many as expected in a row are also what a place is trusted for."""
WINDOW = 64
"""Tokens after the last trusted place that are searched for shorter matches."""
NEAR = 16
"""And for a single token."""
BACKWARDS = 4
"""A place behind the last trusted one must be so many times nearer: texts are mostly edited in order."""
PATIENCE = 4
"""Tokens after a difference for which it is still guessed how the prediction goes on."""
BEGINNING = 8
"""The output's beginning is trusted to be the prediction's as much as a match of so many tokens."""
_BITS = 32


class Place(NamedTuple):
    """Where the output stands in the prediction. A value: any number can be kept."""

    expected: int = 0
    """Index of the token that should come next."""
    run: int = BEGINNING
    """Tokens in a row that came as expected; 0 where the place is lost."""
    anchor: int = 0
    """Index up to which the texts were last known to go together."""
    since: int = 0
    """Output tokens beyond the anchor."""


class Alignment:
    """Follows an output through a prediction. Immutable; a constant number of looks for each token, and one search in
    the sorted places of a gram.

    Memory: about 250 bytes for each token of the prediction.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = prediction
        self._ends: dict[int, list[int]] = {}
        """By gram: the indices after its occurrences, in order."""
        packed = 0
        for end, token in enumerate(prediction, 1):
            packed = _packed(packed, token)
            if end >= GRAM:
                self._ends.setdefault(packed, []).append(end)

    def token(self, index: int) -> int | None:
        return self._tokens[index] if 0 <= index < len(self._tokens) else None

    def follow(self, place: Place, recent: Sequence[int]) -> Place:
        """The place after one more output token, the last of `recent`; up to GRAM of them are looked at."""
        if place.run and self.token(place.expected) == recent[-1]:
            expected, run = place.expected + 1, place.run + 1
        else:
            expected, run = self._find(place.anchor, recent[-GRAM:])
        trusted = run >= GRAM
        return Place(expected, run, expected if trusted else place.anchor, 0 if trusted else place.since + 1)

    def openings(self, place: Place) -> list[int]:
        """Indices of tokens that may come next, likeliest first."""
        if place.run:
            return [place.expected]
        if place.since > PATIENCE:
            return []
        # As many tokens were replaced as were read; or these were inserted.
        return [place.anchor + place.since, place.anchor]

    def _find(self, anchor: int, recent: Sequence[int]) -> tuple[int, int]:
        """(index after the best match of the last tokens, its length); (anchor, 0) if there is none."""
        end, length = self._near(anchor, recent)
        if length < GRAM - 1 and len(recent) == GRAM and (far := self._far(anchor, recent)):
            return far, GRAM
        return end, length

    def _near(self, anchor: int, recent: Sequence[int]) -> tuple[int, int]:
        """The longest match in the window, of equals the nearest."""
        best, longest = anchor, 0
        for end in range(anchor + 1, min(anchor + WINDOW, len(self._tokens)) + 1):
            length = 0
            while length < min(len(recent), end) and self._tokens[end - 1 - length] == recent[-1 - length]:
                length += 1
            if length > longest and (length > 1 or end - anchor <= NEAR):
                best, longest = end, length
        return best, longest

    def _far(self, anchor: int, recent: Sequence[int]) -> int | None:
        packed = 0
        for token in recent:
            packed = _packed(packed, token)
        ends = self._ends.get(packed, [])
        after = bisect_right(ends, anchor)
        around = ends[max(0, after - 1) : after + 1]
        return min(around, key=lambda end: end - anchor if end > anchor else BACKWARDS * (anchor - end), default=None)


class Record:
    """How often guesses came true in this session after runs of about the same length: 0, 1, 2 to 3, 4 to 7, ...

    Until it was seen, PRIORS count as much as DOUBTS guesses. They were measured on held-out Python sources of which
    10 to 30 % of the lines were edited, where the rates were 0.03, 0.5, 0.9, 0.97 and then 0.97 to 0.99; kept lower
    here, for a prediction may also be of another text altogether.
    """

    PRIORS = (0.1, 0.4, 0.75, 0.85, 0.9, 0.95, 0.97)
    DOUBTS = 4.0
    MEMORY = 64.0
    """Guesses of one class that are remembered: later parts of a text may be edited more than earlier ones."""

    def __init__(self) -> None:
        self._hits = [self.DOUBTS * prior for prior in self.PRIORS]
        self._seen = [self.DOUBTS] * len(self.PRIORS)

    def rate(self, run: int) -> float:
        size = self._class(run)
        return self._hits[size] / self._seen[size]

    def add(self, run: int, hit: bool) -> None:
        size = self._class(run)
        kept = min(1.0, (self.MEMORY - 1) / self._seen[size])
        self._hits[size] = kept * self._hits[size] + hit
        self._seen[size] = kept * self._seen[size] + 1

    def _class(self, run: int) -> int:
        return min(run.bit_length(), len(self.PRIORS) - 1)


class PredictionText:
    """One session's output beside its prediction (the `Text` of a `LookupProposer`)."""

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        self._alignment = Alignment(prediction)
        self._record = Record()
        self._prompt_length = prompt_length
        self._output: list[int] = []
        self._places = [Place()]
        """After each output token, and before the first."""

    def read(self, start: int, tokens: list[int]) -> None:
        first = max(0, start - self._prompt_length)
        output = tokens[max(0, self._prompt_length - start) :]
        kept = common_prefix(self._output[first:], output)
        del self._output[first + kept :], self._places[first + kept + 1 :]
        for token in output[kept:]:
            self._commit(token)

    def look_up(self, path: list[int], count: int) -> list[FoundNode]:
        place, recent = self._places[-1], self._output[-GRAM:]
        for token in path:
            recent.append(token)
            place = self._alignment.follow(place, recent)
        # Path probability (negated), order of creation, parent, index in the prediction, run, probability.
        frontier: list[tuple[float, int, int, int, int, float]] = []
        left = 1.0
        guessed: set[int] = set()
        for index in self._alignment.openings(place):
            token_here = self._alignment.token(index)
            if token_here is not None and token_here not in guessed:
                guessed.add(token_here)
                share = left * self._record.rate(place.run)
                heapq.heappush(frontier, (-share, index, 0, index, place.run, share))
                left -= share
        return self._grow(frontier, count)

    def finish(self) -> None:
        """Nothing outlives a session."""

    def _grow(self, frontier: list[tuple[float, int, int, int, int, float]], count: int) -> list[FoundNode]:
        """Chains from each opening, most probable path first."""
        grown: list[FoundNode] = []
        while frontier and len(grown) < count:
            negated, order, parent, index, run, share = heapq.heappop(frontier)
            token = self._alignment.token(index)
            if token is None:
                continue
            grown.append(FoundNode(parent, token, share))
            rate = self._record.rate(run + 1)
            heapq.heappush(frontier, (negated * rate, order, len(grown), index + 1, run + 1, rate))
        return grown

    def _commit(self, token: int) -> None:
        place = self._places[-1]
        openings = self._alignment.openings(place)
        if openings and (guess := self._alignment.token(openings[0])) is not None:
            self._record.add(place.run, guess == token)
        self._output.append(token)
        self._places.append(self._alignment.follow(place, self._output[-GRAM:]))


def _packed(gram: int, token: int) -> int:
    """The gram of GRAM tokens that ends in `token`, as one integer."""
    return (gram << _BITS | token) & (1 << GRAM * _BITS) - 1


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `prediction`; it has no settings."""
    return OpenedProposer(
        any_vocabulary("prediction"),
        LookupProposer(lambda context: PredictionText(context.prediction, context.prompt_length)),
    )
