"""Guess without a model: what followed the last tokens before, in this session (`ngram`, `suffix`), in others' output
where that may be shared (`suffix`), or in a text that the client expects (`prediction`).

All look up every node they are asked about with what stands before it, so they need no memory of their own guesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from drafter_svc.proposers import Answer, DraftRequest, ProposedNode
from drafter_svc.proposers.corpus import REACH, Corpus
from drafter_svc.proposers.growth import GrownNode as Grown
from drafter_svc.proposers.growth import grow
from drafter_svc.proposers.ngram_index import NgramIndex
from drafter_svc.proposers.suffix_automaton import Matcher, SuffixAutomaton
from drafter_svc.session import DraftSession

CHUNK = 256
"""Tokens of output after which a corpus gets them, while the session goes on."""


class Text(Protocol):
    """One session's committed tokens, indexed."""

    def read(self, start: int, tokens: list[int]) -> None:
        """The committed tokens from index `start` on are these; what was read beyond `start` before is no more."""
        ...

    def propose(self, path: list[int], count: int) -> list[Grown]:
        """At most `count` guesses after the committed tokens and `path`."""
        ...

    def finish(self) -> None:
        """The session is over."""
        ...


class LookupProposer:
    """A session's text is made by `text` when it first takes a turn. `count` bounds the guesses below one node."""

    draws = False

    def __init__(self, text: Callable[[DraftSession], Text], count: int) -> None:
        self._text = text
        self._count = count
        self._texts: dict[DraftSession, Text] = {}

    def grow(self, turns: list[DraftRequest]) -> list[Answer]:
        return [self._answer(turn) for turn in turns]

    def close(self, session: DraftSession) -> None:
        text = self._texts.pop(session, None)
        if text is not None:
            text.finish()

    def _answer(self, turn: DraftRequest) -> Answer:
        text = self._texts.get(turn.session)
        if text is None:
            text = self._texts[turn.session] = self._text(turn.session)
        text.read(turn.computed, turn.pending)
        guesses: list[ProposedNode] = []
        for place, start in zip(turn.expand, turn.starts, strict=True):
            first = len(guesses)
            for grown in text.propose(turn.path(place), self._count):
                parent = start if grown.parent == 0 else first + grown.parent - 1
                guesses.append(ProposedNode(parent, grown.token, math.log(grown.probability)))
        return guesses


class NgramText:
    """Prompt lookup: a chain, copied from after the latest earlier occurrence."""

    def __init__(self) -> None:
        self._index = NgramIndex()

    def read(self, start: int, tokens: list[int]) -> None:
        self._index.truncate(start)
        self._index.append(tokens)

    def propose(self, path: list[int], count: int) -> list[Grown]:
        chain = self._index.propose(path, count)
        return [Grown(number, token, probability) for number, (token, probability) in enumerate(chain)]

    def finish(self) -> None:
        """Nothing outlives a session."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Bounds of the tree that `SuffixText` guesses."""

    width: int
    """Guesses below one node."""
    min_probability: float
    """Of a path."""


class SuffixText:
    """A tree from the suffix automaton of the session, and of what others wrote where a corpus is shared."""

    def __init__(self, corpus: Corpus | None, bounds: Growth, first: int) -> None:
        """The corpus is given what comes after the first `first` tokens: a prompt is not ours to tell, and output that
        a session is opened with was told before."""
        self._corpus = corpus
        self._bounds = bounds
        self._first = self._given = first
        self._tokens: list[int] = []
        self._automaton = SuffixAutomaton()

    def read(self, start: int, tokens: list[int]) -> None:
        known = self._tokens[start:]
        if known != tokens[: len(known)]:  # an automaton cannot forget: it is made anew
            self._tokens = [*self._tokens[:start], *tokens]
            self._given = min(self._given, max(self._first, start))
            self._automaton = SuffixAutomaton()
            self._automaton.extend(self._tokens)
        else:
            fresh = tokens[len(known) :]
            self._tokens += fresh
            self._automaton.extend(fresh)
        if len(self._tokens) - self._given >= CHUNK:
            self._give()

    def propose(self, path: list[int], count: int) -> list[Grown]:
        matchers = [Matcher(self._automaton, self._automaton.tail())]
        if self._corpus is not None:
            matchers += self._corpus.matchers(self._tokens)
        for matcher in matchers:
            for token in path:
                matcher.advance(token)
        return grow(matchers, count, self._bounds.width, self._bounds.min_probability)

    def finish(self) -> None:
        self._give()

    def _give(self) -> None:
        """What was written since the last time, with some of what stands before it so that no match ends there."""
        if self._corpus is not None and len(self._tokens) > self._given:
            self._corpus.add(self._tokens[max(self._first, self._given - REACH) :])
            self._given = len(self._tokens)
