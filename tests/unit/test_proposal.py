"""The sparse q that travels is exactly the q that draft tokens are drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.engine.proposal import draw, pack, quantise
from slipstream.errors import InvalidArgument
from slipstream.proposal import MAX_WEIGHT, Proposal, check


def test_kept_tokens_weigh_at_least_one_and_impossible_ones_nothing() -> None:
    ids, weights = quantise(torch.tensor([[0.0, 5.0, -40.0, -math.inf]]), 4)
    assert ids[0, :3].tolist() == [1, 0, 2]
    assert weights.tolist() == [[MAX_WEIGHT, round(MAX_WEIGHT * math.exp(-5.0)), 1, 0]]
    assert pack(ids, weights) == [Proposal((1, 0, 2), tuple(weights[0, :3].tolist()))]


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_a_broken_row_has_no_weights_and_draws_nothing(poison: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1] = poison
    ids, weights = quantise(logits, 3)
    assert weights[1].tolist() == [0, 0, 0]
    assert draw(ids, weights, [1, 1], [0, 1])[1] == -1
    assert pack(ids, weights)[1] is None


def test_packed_proposals_pass_the_check() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)) * 5
    for proposal in pack(*quantise(logits, 16)):
        assert proposal is not None
        check(proposal, 100)


def test_draws_follow_the_quantised_weights() -> None:
    ids, weights = quantise(torch.tensor([[0.3, 1.0, -1.0, 0.0, 2.0, -3.0]]), 4)
    size = 30_000
    tokens = draw(ids.expand(size, -1), weights.expand(size, -1), [2] * size, range(size)).numpy()
    observed = np.bincount(tokens, minlength=6)
    q = np.zeros(6)
    q[ids[0].numpy()] = weights[0].numpy() / int(weights.sum())
    assert observed[q == 0].sum() == 0
    assert stats.chisquare(observed[q > 0], q[q > 0] * size).pvalue > 1e-4


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal((), ()),
        Proposal((1,), (1, 2)),
        Proposal((1, 1), (1, 2)),
        Proposal((10,), (1,)),
        Proposal((-1,), (1,)),
        Proposal((1,), (0,)),
        Proposal((1,), (MAX_WEIGHT + 1,)),
        Proposal(tuple(range(257)), (1,) * 257),
    ],
)
def test_a_proposal_that_no_honest_drafter_sends_is_refused(proposal: Proposal) -> None:
    with pytest.raises(InvalidArgument):
        check(proposal, 10 if len(proposal.token_ids) < 257 else 1000)
