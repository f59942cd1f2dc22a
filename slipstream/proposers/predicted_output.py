"""Propose from the output that the client expects: find where the output stands in it, and copy what follows there.

A known text that is edited comes back with few changes, so its next tokens are proposed as they are. After a
difference the place is found again by the last few tokens, nearest to where the texts last agreed. Decoding guided
by a text that is nearly the output: Sun et al. 2021, arXiv 2106.04970.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from slipstream.proposers.base import OpenedProposer, ProposerSettings, any_vocabulary
from slipstream.proposers.lookup import FoundNode, LookupProposer

GRAM = 4
"""Tokens by which a place is found anywhere; after so many in a row as expected, a place is trusted."""
WINDOW = 64
"""Tokens after the last trusted place that are searched for shorter matches."""
NEAR = 16
"""Tokens after the last trusted place that are searched for a single token."""
BACKWARDS = 4
"""A place behind the last trusted one must be so many times nearer: texts are mostly edited in order."""
PATIENCE = 4
"""Tokens after a difference in which the prediction's next tokens are still proposed."""
BEGINNING = 8
"""Tokens of a match that is trusted as much as that output and prediction begin alike."""
_BITS = 32


class TextPosition(NamedTuple):
    """Where the output stands in the prediction. A value: any number can be kept."""

    expected: int = 0
    """Index of the token that should come next."""
    run: int = 0
    """Tokens in a row that came as expected; 0 where the place is lost."""
    anchor: int = 0
    """Index up to which the texts were last known to go together."""
    since: int = 0
    """Output tokens beyond the anchor."""


class Alignment:
    """Follows an output through a prediction. Immutable; constant work for each token, but for one binary search.

    Memory: about 250 bytes for each token of the prediction.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = prediction
        self._ends: dict[int, list[int]] = {}
        """By packed gram: the indices after its occurrences, in order."""
        gram = 0
        for end, token in enumerate(prediction, 1):
            gram = _pack(gram, token)
            if end >= GRAM:
                self._ends.setdefault(gram, []).append(end)

    def token(self, index: int) -> int | None:
        return self._tokens[index] if 0 <= index < len(self._tokens) else None

    def follow(self, place: TextPosition, recent: Sequence[int]) -> TextPosition:
        """The place after one more output token, the last of `recent`; up to GRAM of them are looked at."""
        if place.run and self.token(place.expected) == recent[-1]:
            expected, run = place.expected + 1, place.run + 1
        else:
            expected, run = self._find(place.anchor, recent[-GRAM:])
        trusted = run >= GRAM
        return TextPosition(expected, run, expected if trusted else place.anchor, 0 if trusted else place.since + 1)

    def openings(self, place: TextPosition) -> list[int]:
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
        ends = self._ends.get(reduce(_pack, recent, 0), [])
        after = bisect_right(ends, anchor)
        around = ends[max(0, after - 1) : after + 1]
        return min(around, key=lambda end: end - anchor if end > anchor else BACKWARDS * (anchor - end), default=None)


class HitRates:
    """Share of right proposals in this sequence, by the length of the run before them: 0, 1, 2 to 3, 4 to 7, ...

    PRIORS count as much as DOUBTS proposals. Measured on held-out Python sources with 10 to 30 % of the lines edited,
    the rates were 0.03, 0.5, 0.9, 0.97 and then 0.97 to 0.99; the priors are lower, for a prediction may also be of
    another text altogether.
    """

    PRIORS = (0.1, 0.4, 0.75, 0.85, 0.9, 0.95, 0.97)
    DOUBTS = 4.0
    MEMORY = 64.0
    """Proposals of one class that are remembered: later parts of a text may be edited more than earlier ones."""

    def __init__(self) -> None:
        self._hits = [self.DOUBTS * prior for prior in self.PRIORS]
        self._seen = [self.DOUBTS] * len(self.PRIORS)

    def rate(self, run: int) -> float:
        index = self._class(run)
        return self._hits[index] / self._seen[index]

    def add(self, run: int, hit: bool) -> None:
        index = self._class(run)
        kept = min(1.0, (self.MEMORY - 1) / self._seen[index])
        self._hits[index] = kept * self._hits[index] + hit
        self._seen[index] = kept * self._seen[index] + 1

    def _class(self, run: int) -> int:
        return min(run.bit_length(), len(self.PRIORS) - 1)


class Chain(NamedTuple):
    """The next node of a chain copied from the prediction; the most probable path sorts first."""

    negated: float
    """Minus the probability of its path."""
    opening: int
    """Index in the prediction at which the chain began."""
    parent: int
    source: int
    """Index in the prediction of the node's token."""
    run: int
    """Tokens in a row that came as expected, if its parent comes."""
    probability: float


class PredictionText:
    """The `Text` that follows one sequence's output through its prediction."""

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        self._alignment = Alignment(prediction)
        self._rates = HitRates()
        self._prompt_left = prompt_length
        """Tokens of the prompt that were not read yet."""
        self._recent: list[int] = []
        """The last GRAM tokens of the output."""
        self._place = TextPosition(run=BEGINNING)

    def read(self, tokens: list[int]) -> None:
        output = tokens[self._prompt_left :]
        self._prompt_left = max(0, self._prompt_left - len(tokens))
        for token in output:
            self._commit(token)

    def look_up(self, path: list[int], count: int) -> list[FoundNode]:
        place, recent = self._place, list(self._recent)
        for token in path:
            recent.append(token)
            place = self._alignment.follow(place, recent)
        openings = self._alignment.openings(place)
        if len(openings) > 1 and len(set(map(self._alignment.token, openings))) == 1:
            del openings[1:]
        chains: list[Chain] = []
        left = 1.0
        for index in openings:
            if self._alignment.token(index) is not None:
                share = left * self._rates.rate(place.run)
                heapq.heappush(chains, Chain(-share, index, 0, index, place.run, share))
                left -= share
        found: list[FoundNode] = []
        while chains and len(found) < count:
            chain = heapq.heappop(chains)
            if (token_here := self._alignment.token(chain.source)) is not None:
                found.append(FoundNode(chain.parent, token_here, chain.probability))
                run, rate = chain.run + 1, self._rates.rate(chain.run + 1)
                longer = Chain(chain.negated * rate, chain.opening, len(found), chain.source + 1, run, rate)
                heapq.heappush(chains, longer)
        return found

    def finish(self) -> None:
        """Nothing outlives a sequence."""

    def _commit(self, token: int) -> None:
        place = self._place
        openings = self._alignment.openings(place)
        if openings and (expected := self._alignment.token(openings[0])) is not None:
            self._rates.add(place.run, expected == token)
        self._recent = [*self._recent, token][-GRAM:]
        self._place = self._alignment.follow(place, self._recent)


def _pack(gram: int, token: int) -> int:
    """The gram of GRAM tokens that ends in `token`, as one integer."""
    return (gram << _BITS | token) & (1 << GRAM * _BITS) - 1


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `prediction`; it has no settings."""
    return OpenedProposer(
        any_vocabulary("prediction"),
        LookupProposer(lambda context: PredictionText(context.prediction, context.prompt_length)),
    )
