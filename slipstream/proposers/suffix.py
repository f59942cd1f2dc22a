"""Propose a tree from suffix matches, most probable path first (SuffixDecoding, arXiv 2411.04975, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import repeat
from typing import NamedTuple

from slipstream.proposers.base import OpenedProposer, ProposerContext, ProposerSettings, any_vocabulary
from slipstream.proposers.corpus import REACH, Corpora, Corpus, CorpusReader
from slipstream.proposers.lookup import DOUBT, FoundNode, LookupProposer, doubt_at, evidence
from slipstream.proposers.suffix_automaton import HITS, Match, Matcher, SuffixAutomaton

CHUNK = 256
"""Tokens of output after which a corpus receives them, while the sequence goes on."""
LEAST_PROBABILITY = 0.05
"""A path less likely than this is not looked up any further."""


class TreeBounds(NamedTuple):
    width: int
    """Most nodes below one node."""
    min_probability: float
    """Least probability of a path."""
    doubt: float = DOUBT
    """Doubt about a match (`lookup.confidence`)."""


class SuffixText:
    """The `Text` of a suffix automaton over the sequence, and over what others wrote where a corpus is shared."""

    def __init__(self, corpus: Corpus | None, bounds: TreeBounds, first: int) -> None:
        """`first`: tokens that the corpus does not receive. Prompts are not ours to share, and output that a sequence
        is opened with was added before."""
        self._corpus = corpus
        self._reader = CorpusReader(corpus) if corpus is not None else None
        self._bounds = bounds
        self._first = self._given = first
        self._tokens: list[int] = []
        self._automaton = SuffixAutomaton()

    def read(self, tokens: list[int]) -> None:
        self._tokens += tokens
        self._automaton.extend(tokens)
        if len(self._tokens) - self._given >= CHUNK:
            self.finish()

    def look_up(self, path: list[int], count: int) -> list[FoundNode]:
        matchers = [Matcher(self._automaton, self._automaton.tail())]
        if self._reader is not None:
            matchers += self._reader.matchers(self._tokens)
        for matcher in matchers:
            for token in path:
                matcher.advance(token)
        return likeliest_tree(matchers, count, self._bounds)

    def finish(self) -> None:
        """Adds to the corpus what was written since the last time, and what stands just before it, so that no match
        ends there."""
        if self._corpus is not None and len(self._tokens) > self._given:
            self._corpus.add(self._tokens[max(self._first, self._given - REACH) :])
            self._given = len(self._tokens)


def continuations(
    automata: Sequence[SuffixAutomaton],
    matches: Sequence[Match],
    width: int,
    enough: float = 0.0,
    doubt: float = DOUBT,
) -> list[tuple[int, float]]:
    """Up to `width` (token, share) after the matches, of which each automaton has one; longest contexts first.

    A share is the `confidence` from the longest context that knows the token, times what longer ones left over: the
    blending of PPM (Cleary and Witten 1984), over all automata; the earlier automaton first among equally long
    contexts. All shares together stay below 1. Shares below `enough` are left out.
    """
    shares: dict[int, float] = {}
    contexts = list(matches)
    several, best = len(contexts) > 1, 0
    left = 1.0
    while contexts and len(shares) < width:
        if several:
            best = max(range(len(contexts)), key=lambda index: contexts[index].length)
        context = contexts[best]
        if not context.length:
            break
        known = automata[best].followers(context)
        judged = evidence(sum(map(HITS, known)), context.length, doubt)
        spent = 0.0
        for token, hits in known:
            share = left * (hits / judged)
            if share < enough or len(shares) == width:
                break
            if token not in shares:
                shares[token] = share
                spent += share
        left -= spent
        if left < enough:
            break
        contexts[best] = automata[best].shorter(context)
    return list(shares.items())


def likeliest_tree(matchers: Sequence[Matcher], nodes: int, bounds: TreeBounds) -> list[FoundNode]:
    """At most `nodes` nodes after what the matchers have read, the most probable path first, within the bounds. The
    matchers do not move."""
    found: list[FoundNode] = []
    automata = [matcher.automaton for matcher in matchers]
    # Path probability (negated, for the smallest comes first), order of creation, parent, token, probability given the
    # parent, and the parent's matches.
    frontier: list[tuple[float, int, int, int, float, list[Match]]] = []
    width, least, doubt = bounds
    order, place = 0, 0
    path, matches = 1.0, [matcher.match for matcher in matchers]
    while place < nodes:
        for token, share in continuations(automata, matches, width, least / path, doubt):
            order += 1
            heappush(frontier, (-path * share, order, place, token, share, matches))
        if not frontier:
            break
        negated, _, parent, token, share, above = heappop(frontier)
        found.append(FoundNode(parent, token, share))
        place += 1
        if place < nodes:
            path, matches = -negated, list(map(SuffixAutomaton.advance, automata, above, repeat(token)))
    return found


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `suffix`, and `ngram`, its name in other engines; `settings.width` and the `corpus_*` settings concern
    it."""
    tokens, salts = settings.corpus_tokens, settings.corpus_salts
    corpora = Corpora(tokens, salts, settings.corpus_shared) if tokens else None

    def open_text(context: ProposerContext) -> SuffixText:
        corpus = corpora.find_corpus(context.cache_salt, context.tenant) if corpora else None
        bounds = TreeBounds(settings.width, LEAST_PROBABILITY, doubt_at(context.sampling.temperature))
        return SuffixText(corpus, bounds, context.length)

    return OpenedProposer(any_vocabulary("suffix"), LookupProposer(open_text))
