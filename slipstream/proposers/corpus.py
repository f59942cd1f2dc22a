"""What sessions wrote, so that the next one may find its words there; bounded, and apart for each tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from slipstream.errors import InvalidArgument
from slipstream.proposers.suffix_automaton import Matcher, SuffixAutomaton

REACH = 32
"""Tokens that a reader who comes new is matched with: longer matches are hardly surer."""


class Corpus:
    """At most `max_tokens` tokens in two generations: texts join the young one, and when it holds its half, the old
    one is dropped and the young one becomes old. Simple, and no automaton ever has to forget.

    About 120 bytes for each token, so 12 MB for 100,000.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 2:
            raise InvalidArgument(f"a corpus of {max_tokens} tokens cannot have two generations.")
        self._half = max_tokens // 2
        self._old, self._young = SuffixAutomaton(), SuffixAutomaton()
        self.version = 0
        """Changes when a generation is dropped: matchers made before keep it alive and should be made anew."""

    def __len__(self) -> int:
        return len(self._old) + len(self._young)

    def add(self, text: Sequence[int]) -> None:
        """A text, or a part of one. Of one that is longer than a generation, the end is kept."""
        text = text[-self._half :]
        if len(self._young) + len(text) > self._half:
            self._old, self._young = self._young, SuffixAutomaton()
            self.version += 1
        self._young.begin()
        self._young.extend(text)

    def matchers(self, recent: Sequence[int]) -> list[Matcher]:
        """A matcher for each generation, which has read the last REACH tokens of `recent`."""
        matchers = [Matcher(self._young), Matcher(self._old)]
        for matcher in matchers:
            for token in recent[-REACH:]:
                matcher.advance(token)
        return matchers


class Corpora:
    """One corpus for each salt, the least recently asked for dropped first: max_tenants * max_tokens bounds them all.

    Apart by default, for how well a guess goes is seen from outside as speed, and would tell one tenant what another
    one wrote. So sessions without a salt have none: all strangers would meet in it. A salt must be hard to guess, or be
    set by whoever knows the tenants. `shared` is for deployments where everyone may know what everyone wrote.
    """

    def __init__(self, max_tokens: int, max_tenants: int = 16, shared: bool = False) -> None:
        if max_tenants < 1:
            raise InvalidArgument("corpora need room for one tenant.")
        self._max_tokens, self._max_tenants, self._shared = max_tokens, max_tenants, shared
        self._corpora: OrderedDict[str, Corpus] = OrderedDict()

    def find_corpus(self, salt: str) -> Corpus | None:
        if not salt and not self._shared:
            return None
        key = "" if self._shared else salt
        corpus = self._corpora.get(key)
        if corpus is None:
            corpus = self._corpora[key] = Corpus(self._max_tokens)
        self._corpora.move_to_end(key)
        if len(self._corpora) > self._max_tenants:
            self._corpora.popitem(last=False)
        return corpus
