"""Recursive rejection: the children of a node are tried one after the other, each against what the ones before it left.

SpecInfer (Miao et al. 2024, arXiv 2305.09781), without replacement as in Sequoia (Chen et al. 2024, arXiv 2402.12374);
EAGLE's (Li et al. 2024, arXiv 2401.15077) zeroing and renormalising is its case of deterministic children. At a node
with target p_1 = p and children x_1, x_2, ... in the order in which they were drawn, q_j the law of x_j GIVEN x_1 ..
x_{j-1}:

    accept x_j with min(1, p_j(x_j) / q_j(x_j)), and go on below it;   else p_{j+1} = norm(max(p_j - q_j, 0))
    and when no child is left, emit y ~ p_{m+1}.

One step emits p_j if what comes after a rejection emits p_{j+1} (Leviathan et al. 2023), so by induction any number of
children emits p; to try each against the same p is biased. A chain is judged as by `rejection`, coin by coin.

What q_j is. The tree merges siblings that say the same, so those of a node are distinct, and how often each was drawn
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

from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.rejection import RejectionRandomness, probability, residual
from verifier_svc.acceptance.result import AcceptanceResult, Distribution, FloatArray


def recursive(
    selection: Selection, chance: RejectionRandomness
) -> Generator[Distribution, FloatArray, AcceptanceResult]:
    """Walks down, at each node past the children it rejects. Total: whatever p, q and tokens are, some token comes
    out.
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
                return AcceptanceResult(tuple(path), chance.draw(len(path), p, Purpose.RESIDUAL), dishonest=True)
            if chance.accepts(len(path), min(1.0, float(p[token]) / q_token), len(rejected)):
                path.append(child)
                node = child
                break
            p = residual(p, proposal, token)
            p = p / p.sum()
            rejected.append(token)
        else:
            purpose = Purpose.RESIDUAL if rejected else Purpose.BONUS
            return AcceptanceResult(tuple(path), chance.draw(len(path), p, purpose))


def _children(selection: Selection) -> defaultdict[int, list[int]]:
    """Of each node, in the selection's order: the rule needs that of drawing."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for index, parent in enumerate(selection.parents):
        children[parent].append(index)
    return children


def _without(proposal: DraftDistribution | None, tokens: Sequence[int]) -> DraftDistribution | None:
    """The proposal given that it is none of these tokens. Nothing is left of a dishonest one only: a sibling's own
    token is not among those before it.
    """
    return proposal.without(tokens) if proposal is not None and tokens else proposal
