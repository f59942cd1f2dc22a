"""Earlier output in which later sequences look up their own tokens: bounded, and apart for each tenant."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import InvalidArgument
from slipstream.proposers.suffix_automaton import Matcher, SuffixAutomaton
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

    def matchers(self, recent: Sequence[int]) -> list[Matcher]:
        """One matcher for each generation, after reading the last REACH tokens of `recent`."""
        matchers = [Matcher(self._young), Matcher(self._old)]
        for matcher in matchers:
            for token in recent[-REACH:]:
                matcher.advance(token)
        return matchers


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
