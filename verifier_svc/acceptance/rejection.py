"""Recursive rejection, the acceptance rule `rejection`: the one rule that divides the target's p by the drafter's q.

It walks a session's candidates from the root and tries the children of a node one after the other, each against what
the ones before it left of p. The output tokens are distributed as p if and only if each candidate was really drawn from
the q that came with it, so the drafter must be trusted. *Which* text comes out depends on the candidates that arrived
in time; only the rule `coupled` fixes the text itself.

At a node with target p_1 = p and children x_1, x_2, ... in the order in which they were drawn, where q_j is the
distribution of x_j GIVEN x_1 .. x_{j-1}:

    accept x_j with min(1, p_j(x_j) / q_j(x_j)), and go on below it;   else p_{j+1} = norm(max(p_j - q_j, 0))
    and when no child is left, emit y ~ p_{m+1}.

One step emits p_j if what comes after a rejection emits p_{j+1}, so by induction any number of children emits p; to try
each against the same p is biased. On a chain this is the rule of Leviathan, Kalman and Matias 2023 (arXiv 2211.17192)
and Chen et al. 2023 (arXiv 2302.01318). Siblings are due to SpecInfer (Miao et al. 2024, arXiv 2305.09781), without
replacement as in Sequoia (Chen et al. 2024, arXiv 2402.12374). EAGLE's zeroing and renormalising (Li et al. 2024,
arXiv 2401.15077) is the case of deterministic children.

What q_j is. The tree merges siblings with the same token, so those of a node are distinct, and how often each was drawn
is not known. Given the earlier ones, the next distinct draw is distributed as its q without their tokens,
renormalised: that is q_j, whether the drafter draws with replacement and its duplicates merge, or draws without and
sends each child the distribution it really came from (where the tokens taken out are gone already), or several
drafters' independent draws meet in one tree. Whether there is a next child at all may depend on the earlier ones, but
not on its own value, nor on anything below or after it. A child without a distribution is a function of the path and
of its earlier siblings, q_j one-hot: it is zeroed out of p.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np

from slipstream.speculation import noise
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.result import AcceptanceResult, Distribution, FloatArray


class RejectionRandomness(Protocol):
    """The source of the rule's randomness; a parameter, so that tests can enumerate every outcome."""

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
    selection: Selection, randomness: RejectionRandomness
) -> Generator[Distribution, FloatArray, AcceptanceResult]:
    """Walks down from the root, at each node past the children it rejects.

    It always ends with a token, whatever p, q and the candidates are.
    """
    children, node, path = _children(selection), ROOT, list[int]()
    while True:
        p = yield Distribution(node)
        rejected = list[int]()
        for child in children[node]:
            token = selection.token_ids[child]
            proposal = _without(selection.distributions[child], rejected)
            q_token = probability(proposal, token)
            if q_token <= 0.0:  # not a draw from its own q; to ignore it, and what comes after, is exact
                return AcceptanceResult(tuple(path), randomness.draw(len(path), p, Purpose.RESIDUAL), dishonest=True)
            if randomness.accepts(len(path), min(1.0, float(p[token]) / q_token), len(rejected)):
                path.append(child)
                node = child
                break
            p = residual(p, proposal, token)
            p = p / p.sum()
            rejected.append(token)
        else:
            purpose = Purpose.RESIDUAL if rejected else Purpose.BONUS
            return AcceptanceResult(tuple(path), randomness.draw(len(path), p, purpose))


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


def _children(selection: Selection) -> defaultdict[int, list[int]]:
    """The children of each node in the selection's order, which is that of drawing."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for index, parent in enumerate(selection.parents):
        children[parent].append(index)
    return children


def _without(proposal: DraftDistribution | None, tokens: Sequence[int]) -> DraftDistribution | None:
    """The proposal given that it is none of these tokens. Only a dishonest one has nothing left: a sibling's own token
    is not among those before it."""
    return proposal.without(tokens) if proposal is not None and tokens else proposal
