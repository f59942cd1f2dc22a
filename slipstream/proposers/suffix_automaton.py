"""Every substring of the texts seen so far, how often it occurred, and what followed it.

The automaton: Blumer, Blumer, Haussler, Ehrenfeucht, Chen and Seiferas, "The smallest automaton recognizing the
subwords of a text", 1985. Suffixes as a drafter: SuffixDecoding, arXiv 2411.04975, and SAM Decoding, arXiv 2411.10666.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

ROOT = 0
_NONE = 0
"""No transition leads to the root."""
COUNT_LIMIT = 256
"""Counts stop here. Counts strictly grow along suffix links, so this also bounds the work of one appended token: in a
loop of one token every shorter loop is a suffix, and counting them all would take quadratic time."""


class Match(NamedTuple):
    """The longest substring, of `length` tokens, that the tokens read end in; `state` stands for it.

    It is right until the automaton grows, which may split a state's shorter strings off to a clone.
    """

    state: int
    length: int


EMPTY = Match(ROOT, 0)
HITS = itemgetter(1)
"""The hits of a follower (`SuffixAutomaton.followers`)."""


class SuffixAutomaton:
    """Online and generalised: several texts, none of which runs into the next. At most two states for each token.

    A state has its first transition in two arrays and the others in a dict, for most states have just one.
    Memory: about 120 bytes for each token of source code; 160 was the most measured, on random tokens.
    """

    def __init__(self) -> None:
        self._link = array("i", [ROOT])
        self._length = array("i", [0])  # of the state's longest string; its shortest is one longer than its link's
        self._count = array("i", [0])  # occurrences, up to COUNT_LIMIT
        self._token = array("i", [0])  # the first transition: its token
        self._target = array("i", [_NONE])  # and where it leads
        self._others: dict[int, dict[int, int]] = {}
        self._last = ROOT
        self._appended = 0

    def __len__(self) -> int:
        """Tokens appended."""
        return self._appended

    @property
    def states(self) -> int:
        return len(self._link)

    def begin(self) -> None:
        """Begins another text."""
        self._last = ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        counts, links = self._count, self._link
        for token in tokens:
            state = self._last = self._append(token)
            self._appended += 1
            while state != ROOT and (count := counts[state]) < COUNT_LIMIT:
                counts[state] = count + 1
                state = links[state]

    def tail(self) -> Match:
        """The longest suffix of the text that also occurred earlier, so that something may have followed it."""
        state = self._last
        while state != ROOT and self._count[state] < 2:
            state = self._link[state]
        return Match(state, self._length[state])

    def advance(self, match: Match, token: int) -> Match:
        """The longest suffix of what was matched and then `token`. Amortised constant along one text."""
        state, length = match
        while True:
            if self._token[state] == token:
                target = self._target[state]
            else:
                target = self._others[state].get(token, _NONE) if state in self._others else _NONE
            if target != _NONE:
                return Match(target, length + 1)
            if state == ROOT:
                return EMPTY
            state = self._link[state]
            length = self._length[state]

    def shorter(self, match: Match) -> Match:
        """The longest proper suffix of the match that occurs elsewhere too; the empty one at the root."""
        state = self._link[match.state]
        return Match(state, self._length[state]) if state != ROOT else EMPTY

    def last(self, match: Match, most: int) -> Match:
        """The match of its last `most` tokens, at least one."""
        state, length = match
        if length <= most:
            return match
        while self._length[self._link[state]] >= most:
            state = self._link[state]
        return Match(state, most)

    def count(self, match: Match) -> int:
        """Occurrences of the matched string."""
        return self._count[match.state]

    def followers(self, match: Match) -> list[tuple[int, int]]:
        """(token, how often it followed the matched string); of equals, the one that was seen first comes first."""
        state = match.state
        first = self._target[state]
        if first == _NONE:
            return []
        counts = self._count
        if state not in self._others:
            return [(self._token[state], counts[first])]
        followers = [(self._token[state], counts[first])]
        followers += [(token, counts[target]) for token, target in self._others[state].items()]
        followers.sort(key=HITS, reverse=True)
        return followers

    def _append(self, token: int) -> int:
        """The state of the text so far and then `token`."""
        state = self._last
        target = self._next(state, token)
        if target != _NONE:  # an earlier text began with just this
            return self._exactly(state, token, target)
        fresh = self._add(self._length[state] + 1)
        while target == _NONE:
            if self._target[state] == _NONE:
                self._token[state], self._target[state] = token, fresh
            else:
                self._others.setdefault(state, {})[token] = fresh
            if state == ROOT:
                return fresh
            state = self._link[state]
            target = self._next(state, token)
        self._link[fresh] = self._exactly(state, token, target)
        return fresh

    def _exactly(self, state: int, token: int, target: int) -> int:
        """The state whose longest string is that of `state` and then `token`: `target`, or a part split off from it."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add(length)
        self._link[clone], self._link[target] = self._link[target], clone
        self._count[clone] = self._count[target]
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        if target in self._others:
            self._others[clone] = self._others[target].copy()
        while self._next(state, token) == target:
            if self._token[state] == token:
                self._target[state] = clone
            else:
                self._others[state][token] = clone
            if state == ROOT:
                break
            state = self._link[state]
        return clone

    def _add(self, length: int) -> int:
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        self._token.append(0)
        self._target.append(_NONE)
        return len(self._link) - 1

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        return self._others[state].get(token, _NONE) if state in self._others else _NONE


class Matcher:
    """The longest match of one reader's latest tokens, until the automaton grows. `match` is a value: keep any number,
    go back to any."""

    def __init__(self, automaton: SuffixAutomaton, match: Match = EMPTY) -> None:
        self.automaton = automaton
        self.match = match

    def advance(self, token: int) -> None:
        self.match = self.automaton.advance(self.match, token)
