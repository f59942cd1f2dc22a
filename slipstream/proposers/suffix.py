"""A tree of guesses from suffix matches, most probable path first (SuffixDecoding, arXiv 2411.04975, section 3)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from drafter_svc.proposers.belief import believed
from drafter_svc.proposers.suffix_automaton import Match, Matcher, SuffixAutomaton


class GrownNode(NamedTuple):
    """One guess, named as on the wire: parent 0 is the root, parent n the n-th node of the list."""

    parent: int
    token: int
    probability: float
    """Given the parent; a path's is the product of its nodes'."""


def continuations(
    automata: Sequence[SuffixAutomaton], matches: Sequence[Match], width: int, enough: float = 0.0
) -> list[tuple[int, float]]:
    """Up to `width` (token, share) after the matches, one for each automaton; those of the longest context first.

    A share is `believed` from the longest context that knows the token, times what the longer ones left over: the
    blending of PPM (Cleary and Witten 1984), over the contexts of all automata; of equally long ones, that of the
    earlier automaton. All shares together stay below 1. Shares below `enough` are left out.
    """
    shares: dict[int, float] = {}
    contexts = list(matches)
    left = 1.0
    while len(shares) < width and left >= enough:
        best = max(range(len(contexts)), key=lambda index: contexts[index].length, default=-1)
        if best < 0 or not contexts[best].length:
            break
        known = automata[best].followers(contexts[best])
        seen = sum(hits for _, hits in known)
        spent = 0.0
        for token, hits in known:
            share = left * believed(hits, seen, contexts[best].length)
            if share < enough or len(shares) == width:
                break
            if token not in shares:
                shares[token] = share
                spent += share
        left -= spent
        contexts[best] = automata[best].shorter(contexts[best])
    return list(shares.items())


def grow(matchers: Sequence[Matcher], nodes: int, width: int, min_probability: float) -> list[GrownNode]:
    """At most `nodes` guesses beyond what the matchers have read, none on a path below `min_probability`.

    At most `width` children each. Every node is looked up with all matchers: that of the session's own text first,
    then those of the tenant's corpus. They stay where they are.
    """
    grown: list[GrownNode] = []
    automata = [matcher.automaton for matcher in matchers]
    # Path probability (negated, for the smallest comes first), order of creation, the node, its parent's matches.
    frontier: list[tuple[float, int, GrownNode, list[Match]]] = []
    order = 0
    path, matches = 1.0, [matcher.match for matcher in matchers]
    while len(grown) < nodes:
        for token, share in continuations(automata, matches, width, min_probability / path):
            order += 1
            heapq.heappush(frontier, (-path * share, order, GrownNode(len(grown), token, share), matches))
        if not frontier:
            break
        negated, _, node, above = heapq.heappop(frontier)
        grown.append(node)
        path = -negated
        matches = [automaton.advance(match, node.token) for automaton, match in zip(automata, above, strict=True)]
    return grown
