"""Block verification: judge the chain as a whole, and keep its longest prefix that passes.

Sun et al., "Block verification accelerates speculative decoding", ICLR 2025 (arXiv 2403.10444), algorithm 2. With
p(.) the target's and q(.) the draft's distribution after the first i draft tokens x_1 .. x_i, and K tokens drafted,

    p_0 = 1,   p_i = min(p_{i-1} p(x_i) / q(x_i), 1)                                    (`ratio` below)
    Z_i = sum_x max(p_i p(x) - q(x), 0) = p_i (1 - sum_S p) + sum_S max(p_i p - q, 0)   (S: the support of q)
    h_i = Z_i / (Z_i + 1 - p_i) for i < K,   h_K = p_K
    tau = the LARGEST i with u_i <= h_i, or 0;   then y ~ p if tau = K, else y ~ norm(max(p_tau p - q, 0)).

A failed coin does not end the walk: a later one may still pass, and takes everything before it along. That is where
the gain over token-by-token rejection comes from (for a deterministic draft there is none), and to stop at the first
failure is biased. Exact iff q is honest and the selection did not look at tokens, as for `rejection`.

Coins and tokens beyond tau have been looked at (in `rejection` they are not), and a later round that met them again
would know that they had failed. So the coins belong to the round (`RoundChance`), and what a drafter redraws after a
round does not come from the noise it drew from before (`drafter_svc.session.Session.stream`).

Nor is a judged token judged again: y is never x_{tau+1}. For y to be it takes p_tau p(x_{tau+1}) > q(x_{tau+1}); then
p_{tau+1} = 1, in floating point too, hence h_{tau+1} = 1, and the block does not end at tau. So after a round that ends
early the commit leaves the chain, whose only token for that place was x_{tau+1}, and the drafter begins a new one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from slipstream.speculation import noise
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.rejection import KeyedRandomness, RejectionRandomness, probability, residual
from verifier_svc.acceptance.result import AcceptanceResult, Distribution, FloatArray


class RoundChance(KeyedRandomness):
    """As `KeyedRandomness`, but a coin belongs to (first position of the round, depth): no two rounds share a first
    position, so no coin is thrown twice. The draws stay with their position, which a round ends by filling.
    """

    def accepts(self, depth: int, probability: float, sibling: int = 0) -> bool:
        return noise.scalar_uniform(noise.key(self._seed, self._position, Purpose.ACCEPT), depth) < probability


@dataclass(frozen=True, slots=True)
class _Stop:
    """The block may end after `size` tokens, right before this draft token."""

    size: int
    p: FloatArray
    ratio: float
    proposal: DraftDistribution | None
    token: int

    def replacement(self) -> FloatArray:
        """max(p_i p - q, 0), not normalised, without the draft token, for which it is 0 where the block ends. Where
        nothing is left the block does not end here; should rounding do it after all, p takes its place.
        """
        left = residual(self.ratio * self.p, self.proposal, self.token)
        others = left.copy()
        others[self.token] = 0.0
        return others if others.any() else left


def block(selection: Selection, chance: RejectionRandomness) -> Generator[Distribution, FloatArray, AcceptanceResult]:
    """Walks down the chain of first children to its end, or to where nothing further can pass. Total: whatever p, q
    and token are, some token comes out.
    """
    node, path, ratio, dishonest = ROOT, list[int](), 1.0, False
    stop: _Stop | None = None
    # Once p_i is 0 all later p_i, Z_i and h_i are.
    while ratio > 0.0 and (child := selection.first_child(node)) is not None:
        p = yield Distribution(node)
        token, proposal = selection.token_ids[child], selection.distributions[child]
        q_token = probability(proposal, token)
        if q_token <= 0.0:  # not a draw from its own q; the chain counts as ending before it
            dishonest = True
            break
        here = _Stop(len(path), p, ratio, proposal, token)
        if stop is None or chance.accepts(len(path) - 1, _threshold(here)):
            stop = here
        ratio = min(ratio * float(p[token]) / q_token, 1.0)
        path.append(child)
        node = child
    if stop is None or chance.accepts(len(path) - 1, ratio):
        p = yield Distribution(node)
        return AcceptanceResult(tuple(path), chance.draw(len(path), p, Purpose.BONUS), dishonest)
    replacement = chance.draw(stop.size, stop.replacement(), Purpose.RESIDUAL)
    return AcceptanceResult(tuple(path[: stop.size]), replacement, dishonest)


def _threshold(stop: _Stop) -> float:
    """h_i for i < K. 0/0 is 1: nothing was lost so far, so nothing may be replaced before here, and a replacement
    never is the draft token it replaces.
    """
    excess, lost = _excess(stop), 1.0 - stop.ratio
    return excess / (excess + lost) if excess + lost > 0.0 else 1.0


def _excess(stop: _Stop) -> float:
    """Z_i from the support of q alone: elsewhere max(p_i p - q, 0) is p_i p."""
    if stop.proposal is None:
        return stop.ratio * (1.0 - float(stop.p[stop.token]))
    inside = stop.p[list(stop.proposal.token_ids)]
    weights = np.array(stop.proposal.weights, dtype=np.float64)
    over = np.maximum(stop.ratio * inside - weights / weights.sum(), 0.0)
    return stop.ratio * max(0.0, 1.0 - float(inside.sum())) + float(over.sum())
