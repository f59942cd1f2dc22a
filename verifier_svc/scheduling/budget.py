"""Divides the candidates of one step: those of all `coupled` sessions compete for it.

`allot`, a pure function, returns how many candidates of each session a step verifies. The rest of this text shows that
it finds the best division.

A step over S sessions that decode and n candidate nodes takes t(n) seconds. Session s commits one token of its own and
every node on its accepted path. Node i of session s is accepted with its path probability p[s][i], so the step commits

    E = S + sum of p[s][i] over the chosen nodes          tokens in expectation, and the policy maximises E / t(n).

**Why scanning n is enough.** Fix n. The denominator is then the same for every choice, so the best choice has the
largest sum, and no n of the eligible nodes (the first `cap` of each session) have a larger sum than the n largest.
A session's probabilities descend (`Offer` lowers one that calibration put above its predecessor); with ties given to
the earlier node, the n largest are therefore a prefix of each session's order. Such a choice is allowed, because a
parent stands before its children, so that every prefix is connected. The bound is met for each n: the best of the
choices for n = 0 .. room is the best of all. Nothing was assumed of t; it may be convex, concave or have steps. The
work is one sort and one pass over it, O(N log N) for N nodes.

**What follows.** Adaptive draft length: a sure session gets many nodes, an unsure one few. Speculation off under load:
where one more node costs more than it brings, n = 0 wins, and ties go to the smaller n. Fairness: nodes of equal
probability go to the sessions in turn; a session with poor candidates gets none of the room but always its own token,
which is not part of the competition. So nothing that one tenant's candidates promise takes another tenant's tokens.

**What a tenant is owed** (`step_shares`). The `least` best nodes of its sessions come before all others and are chosen,
whatever they promise; the other nodes compete as before, and the best n is sought from there on.

**Prompts pay for themselves.** With P prompt tokens in the step, what they add to a step without candidates is taken
off its time: E / (t(S + P + n) - (t(S + P) - t(S))). Their work has to be done anyway. Were it shared by all tokens, as
in E / t(S + P + n), candidates would be taken in a step full of prompts that cost more than they bring.

The objective is the goodput of SmartSpec and TurboSpec (Liu et al., arXiv 2406.14066), expected tokens over predicted
time, here over the nodes of all trees. The ratio of one step stands for the throughput of many as far as steps
are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEAST_S = 1e-9
"""Least seconds of a step."""


class Offer(NamedTuple):
    """Candidates of one decoding session."""

    probabilities: Sequence[float]
    """Calibrated path probabilities of its candidates, best first, in [0, 1]. One above its predecessor counts as the
    predecessor, so that the chosen ones stay a prefix."""
    cap: int
    """Most nodes that this session may get."""
    group: int = 0
    """The number of its tenant, of those in the step."""


@dataclass(frozen=True, slots=True)
class Allotment:
    counts: list[int]
    """Number of nodes chosen of each offer, from its first on."""
    tokens: float
    """Tokens that the step is expected to commit."""
    seconds: float
    """Seconds that the step is expected to take."""


def allot(
    offers: Sequence[Offer],
    seconds: Callable[[range], Sequence[float]],
    room: int,
    base: int | None = None,
    prefill: int = 0,
    least: Mapping[int, int] | None = None,
) -> Allotment:
    """Chooses candidates so that the step's expected tokens over expected seconds are the most. Deterministic.

    `seconds` returns the durations of steps with so many tokens, `room` is the number of candidates that fit, `base`
    the tokens of decoding besides, one per offer if not given, and `prefill` the prompts' tokens. `least`: by the
    group of offers (`Offer.group`), how many of its candidates are chosen in any case, as far as there is room.
    """
    base = len(offers) if base is None else base
    start = base + prefill
    if room <= 0 or not any(offer.probabilities for offer in offers):
        return Allotment([0] * len(offers), float(len(offers)), max(seconds(range(start, start + 1))[0], LEAST_S))
    probabilities, owners = _ranked(offers)
    size, sure = min(len(probabilities), room), 0
    if least:
        groups = np.array([offer.group for offer in offers])[owners]
        chosen = np.zeros(len(groups), dtype=bool)
        for group, count in least.items():
            chosen[np.flatnonzero(groups == group)[:count]] = True
        order = np.argsort(~chosen, kind="stable")
        probabilities, owners, sure = probabilities[order], owners[order], min(int(chosen.sum()), size)
    tokens = np.concatenate(([float(len(offers))], probabilities[:size])).cumsum()
    durations = np.maximum(seconds(range(start, start + size + 1)), LEAST_S)
    prompts = durations[0] - seconds(range(base, base + 1))[0] if prefill else 0.0
    decoding = np.maximum(durations - prompts, LEAST_S)
    best = sure + int((tokens / decoding)[sure:].argmax())  # of equal ones the first: the smaller of two equal steps
    counts: list[int] = np.bincount(owners[:best], minlength=len(offers)).tolist()
    return Allotment(counts, float(tokens[best]), float(durations[best]))


def _ranked(offers: Sequence[Offer]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Probability and session of all eligible nodes, in the order in which they are taken.

    Rank before session: among equals the sessions take turns, and no node comes before its predecessor.
    """
    sizes = [min(offer.cap, len(offer.probabilities)) for offer in offers]
    table = np.full((max(sizes, default=0), len(offers)), -1.0)  # by rank and session; -1 where there is none
    for index, (offer, size) in enumerate(zip(offers, sizes, strict=True)):
        if size:
            table[:size, index] = offer.probabilities[:size]
    nodes = np.minimum.accumulate(table, axis=0).ravel()
    order = np.argsort(-nodes, kind="stable")[: sum(sizes)]
    return nodes[order], order % max(len(offers), 1)
