"""Rejection sampling: accept x ~ q with min(1, p(x)/q(x)), else draw from norm(max(p - q, 0)).

Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). The tokens emitted are
distributed as p iff each draft token was really drawn from the q that came with it, and the selection did not look at
its value: so it judges the chain of first children, and its sessions select with `select_chain`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import numpy as np

from slipstream.speculation import noise
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.result import AcceptanceResult, Distribution, FloatArray


class RejectionRandomness(Protocol):
    """Where a rule's randomness comes from; a parameter, so that tests can enumerate every outcome."""

    def accepts(self, depth: int, probability: float, sibling: int = 0) -> bool:
        """A coin for the sibling-th candidate (0 is the first) `depth` tokens after the prefix."""
        ...

    def draw(self, depth: int, weights: FloatArray, purpose: Purpose) -> int:
        """A token with probability proportional to its weight; at least one weight is positive."""
        ...


class KeyedRandomness:
    """Randomness of (seed, position, purpose); `position` is that of the first token after the prefix."""

    def __init__(self, seed: int, position: int) -> None:
        self._seed, self._position = seed, position

    def accepts(self, depth: int, probability: float, sibling: int = 0) -> bool:
        stream = noise.key(self._seed, self._position + depth, Purpose.ACCEPT)
        return noise.scalar_uniform(stream, sibling) < probability

    def draw(self, depth: int, weights: FloatArray, purpose: Purpose) -> int:
        possible = np.flatnonzero(weights > 0.0)
        stream = noise.key(self._seed, self._position + depth, purpose)
        scores = np.log(weights[possible]) + noise.gumbel(stream, possible)
        return int(possible[int(scores.argmax())])


def rejection(
    selection: Selection, chance: RejectionRandomness
) -> Generator[Distribution, FloatArray, AcceptanceResult]:
    """Walks down the chain of first children. Total: whatever p, q and token are, some token comes out."""
    node, path = ROOT, list[int]()
    while True:
        p = yield Distribution(node)
        depth = len(path)
        child = selection.first_child(node)
        if child is None:
            return AcceptanceResult(tuple(path), chance.draw(depth, p, Purpose.BONUS))
        token, proposal = selection.token_ids[child], selection.distributions[child]
        q_token = probability(proposal, token)
        if q_token <= 0.0:  # not a draw from its own q; to ignore it is exact
            return AcceptanceResult(tuple(path), chance.draw(depth, p, Purpose.RESIDUAL), dishonest=True)
        if not chance.accepts(depth, min(1.0, float(p[token]) / q_token)):
            return AcceptanceResult(tuple(path), chance.draw(depth, residual(p, proposal, token), Purpose.RESIDUAL))
        path.append(child)
        node = child


def probability(proposal: DraftDistribution | None, token: int) -> float:
    """q(token); without a proposal the draft was deterministic, so q is one there."""
    if proposal is None:
        return 1.0
    if token not in proposal.token_ids:
        return 0.0
    return proposal.weights[proposal.token_ids.index(token)] / sum(proposal.weights)


def residual(p: FloatArray, proposal: DraftDistribution | None, token: int) -> FloatArray:
    """max(p - q, 0), not normalised; p itself where nothing is left (p = q up to rounding). Overwrites nothing."""
    left = p.copy()
    if proposal is None:
        left[token] = 0.0
    else:
        support = np.array(proposal.token_ids)
        weights = np.array(proposal.weights, dtype=np.float64)
        left[support] = np.maximum(p[support] - weights / weights.sum(), 0.0)
    return left if left.any() else p
