"""Earlier output in which later sequences look up their own tokens: bounded, and apart for each tenant."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import InvalidArgument
from slipstream.proposers.suffix_automaton import Match, Matcher, SuffixAutomaton
from slipstream.tenants import TenantCache

REACH = 32
"""Tokens that a new matcher reads first: longer matches are hardly surer."""


class Corpus:
    """At most `max_tokens` tokens in two generations, for an automaton cannot forget: texts join the young generation,
    and when it holds its half, the old one is dropped and the young one becomes old.

    Memory: about 120 bytes for each token, so 12 MB for 100,000.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 2:
            raise InvalidArgument(f"a corpus of {max_tokens} tokens cannot have two generations.")
        self._half = max_tokens // 2
        self._old, self._young = SuffixAutomaton(), SuffixAutomaton()

    def __len__(self) -> int:
        return len(self._old) + len(self._young)

    def add(self, text: Sequence[int]) -> None:
        """Adds a text or a part of one; at most its last `max_tokens / 2` tokens."""
        text = text[-self._half :]
        if len(self._young) + len(text) > self._half:
            self._old, self._young = self._young, SuffixAutomaton()
        self._young.begin()
        self._young.extend(text)

    def generations(self) -> list[SuffixAutomaton]:
        """Those that hold any text, the young one first."""
        return [automaton for automaton in (self._young, self._old) if len(automaton)]


class CorpusReader:
    """The matches of one sequence's last REACH tokens in a corpus. They move along with the sequence, and are sought
    again where the corpus has changed: it does so once in some hundred tokens."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._known: list[tuple[SuffixAutomaton, Match, int]] = []
        """By generation: the match, and how many tokens the automaton had."""
        self._length = 0
        """Tokens of the sequence that the matches are of."""

    def matchers(self, tokens: Sequence[int]) -> list[Matcher]:
        """One new matcher for each generation that holds any text, after the last REACH tokens of `tokens`: those of
        the last call, and what was appended since."""
        generations = self._corpus.generations()
        if not generations:
            return []
        known = {automaton: match for automaton, match, size in self._known if size == len(automaton)}
        fresh = tokens[max(self._length, len(tokens) - REACH) :]
        found: list[Matcher] = []
        for automaton in generations:
            match = known.get(automaton)
            matcher = Matcher(automaton) if match is None else Matcher(automaton, match)
            for token in tokens[-REACH:] if match is None else fresh:
                matcher.advance(token)
            matcher.match = automaton.last(matcher.match, REACH)
            found.append(matcher)
        self._known = [(each.automaton, each.match, len(each.automaton)) for each in found]
        self._length = len(tokens)
        return found


class Corpora:
    """One corpus for each cache salt, at most `max_tenants`; a tenant with many salts drops its own first.

    They are apart because acceptance shows as speed: from a shared corpus a tenant could learn what another one wrote.
    So sequences without a salt have no corpus. A salt must be hard to guess, or set by a party that knows the tenants.
    `shared` is for deployments in which all may know what others wrote.
    """

    def __init__(self, max_tokens: int, max_tenants: int = 16, shared: bool = False) -> None:
        if max_tenants < 1:
            raise InvalidArgument("corpora need room for one tenant.")
        self._max_tokens, self._shared = max_tokens, shared
        self._corpora: TenantCache[str, Corpus] = TenantCache(max_tenants)

    def find_corpus(self, salt: str, tenant: str = "") -> Corpus | None:
        if not salt and not self._shared:
            return None
        tenant, key = ("", "") if self._shared else (tenant, salt)
        corpus = self._corpora.get(tenant, key)
        if corpus is None:
            corpus = Corpus(self._max_tokens)
            self._corpora.put(tenant, key, corpus)
        return corpus
