"""How many candidates of each session a step verifies: all sessions compete for it, and none is in the choice.

A step over S sessions that decode and n candidate nodes takes t(n) seconds. Session s commits one token of its own and
every node on its accepted path. Node i of session s is accepted with its path probability p[s][i], so the step commits

    E = S + sum of p[s][i] over the chosen nodes          tokens in expectation, and the policy maximises E / t(n).

**Why scanning n is enough.** Fix n. The denominator is then the same for every choice, so the best choice has the
largest sum, and no n of the eligible nodes (the first `cap` of each session) have a larger sum than the n largest.
Best-first order puts a session's probabilities in descending order; with ties given to the earlier node, the n largest
are therefore a prefix of each session's order. Such a choice is allowed, because a parent stands before its children,
so that every prefix is connected. The bound is met for each n: the best of the choices for n = 0 .. room is the best of
all. Nothing was asked of t; it may be convex, concave or have steps. The work is one sort and one pass over it,
O(N log N) for N nodes.

**What follows.** Adaptive draft length: a sure session gets many nodes, an unsure one few. Speculation off under load:
where one more node costs more than it brings, n = 0 wins, and ties go to the smaller n. Fairness: nodes of equal
probability go to the sessions in turn; a session with poor candidates gets none of the room but always its own token,
which is not part of the competition.

The objective is the goodput of SmartSpec and TurboSpec (Liu et al., arXiv 2406.14066), expected tokens over predicted
time, here over the nodes of all trees. The ratio of one step stands for the throughput of many as far as steps
are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """What one decoding session brings to the competition."""

    probabilities: Sequence[float]
    """Calibrated path probabilities of its candidates, best first, in [0, 1]. One above its predecessor counts as the
    predecessor: what is taken must stay a prefix."""
    cap: int
    """The most nodes this session may get."""


@dataclass(frozen=True, slots=True)
class Allotment:
    counts: list[int]
    """Nodes of each offer, in its order: the first so many."""
    tokens: float
    """Expected number of tokens that the step commits."""
    seconds: float
    """Expected duration of the step."""


def allot(offers: Sequence[Offer], seconds: Callable[[int], float], room: int, base: int | None = None) -> Allotment:
    """Divides the room of one step. Deterministic.

    `seconds(m)` is the duration of a step of m tokens in all, `room` the number of candidates that fit into it, and
    `base` the step's other tokens: one per offer (the default), plus any prefill, which costs time and commits nothing.
    """
    base = len(offers) if base is None else base
    ranked = _ranked(offers)[: max(room, 0)]
    tokens = best_tokens = float(len(offers))
    best_size, best_seconds = 0, _positive(seconds(base))
    for size, (negated, _, _) in enumerate(ranked, 1):
        tokens -= negated
        duration = _positive(seconds(base + size))
        # tokens / duration > best_tokens / best_seconds; strict, so that the smaller of two equal steps wins.
        if tokens * best_seconds > best_tokens * duration:
            best_size, best_tokens, best_seconds = size, tokens, duration
    counts = [0] * len(offers)
    for _, _, offer in ranked[:best_size]:
        counts[offer] += 1
    return Allotment(counts, best_tokens, best_seconds)


def _ranked(offers: Sequence[Offer]) -> list[tuple[float, int, int]]:
    """(-probability, rank in its session, session) of all eligible nodes, in the order in which they are taken.

    Rank before session: among equals the sessions take turns, and no node comes before its predecessor.
    """
    nodes: list[tuple[float, int, int]] = []
    for index, offer in enumerate(offers):
        negated = float("-inf")
        for rank in range(min(offer.cap, len(offer.probabilities))):
            negated = max(negated, -offer.probabilities[rank])
            nodes.append((negated, rank, index))
    nodes.sort()
    return nodes


def _positive(seconds: float) -> float:
    return max(seconds, 1e-9)
