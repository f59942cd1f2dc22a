"""The sparse q that travels is exactly the q that draft tokens are drawn from."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch

from slipstream.engine.engine import ModelOutput
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.sampler.draft_draws import draw, pack, quantise
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument
from slipstream.proposers.base import Proposal
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.speculation.draft_distribution import MAX_TOKENS, MAX_WEIGHT, DraftDistribution, checked
from slipstream.speculation.sampling_params import SamplingParams


def test_kept_tokens_weigh_at_least_one_and_impossible_ones_nothing() -> None:
    ids, weights = quantise(torch.tensor([[0.0, 5.0, -40.0, -math.inf]]), 4)
    assert ids[0, :3].tolist() == [1, 0, 2]
    assert weights.tolist() == [[MAX_WEIGHT, round(MAX_WEIGHT * math.exp(-5.0)), 1, 0]]
    assert pack(ids, weights) == [DraftDistribution((1, 0, 2), tuple(weights[0, :3].tolist()))]


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_a_broken_row_has_no_weights_and_draws_nothing(poison: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1] = poison
    ids, weights = quantise(logits, 3)
    assert weights[1].tolist() == [0, 0, 0]
    assert draw(ids, weights, [1, 1], [0, 1], 2)[1].tolist() == [-1, -1]
    assert pack(ids, weights)[1] is None


def test_packed_proposals_pass_the_check() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)) * 5
    for proposal in pack(*quantise(logits, 16)):
        assert proposal is not None
        assert checked(proposal.token_ids, proposal.weights, 100) == proposal


def test_draws_follow_the_quantised_weights() -> None:
    ids, weights = quantise(torch.tensor([[0.3, 1.0, -1.0, 0.0, 2.0, -3.0]]), 4)
    size = 30_000
    tokens = draw(ids.expand(size, -1), weights.expand(size, -1), [2] * size, range(size))[:, 0].numpy()
    observed = np.bincount(tokens, minlength=6)
    q = np.zeros(6)
    q[ids[0].numpy()] = weights[0].numpy() / int(weights.sum())
    assert observed[q == 0].sum() == 0
    assert scipy.stats.chisquare(observed[q > 0], q[q > 0] * size).pvalue > 1e-4


def test_siblings_are_drawn_one_after_the_other_from_what_is_left() -> None:
    ids, weights = torch.tensor([[7, 3, 9]]), torch.tensor([[60_000, 20_000, 5_000]])
    size, q = 30_000, DraftDistribution((7, 3, 9), (60_000, 20_000, 5_000))
    tokens = draw(ids.expand(size, -1), weights.expand(size, -1), range(size), [2] * size, 4).tolist()
    observed = Counter(tuple(row) for row in tokens)
    expected = {
        order: math.prod(share(q.without(order[:index]), token) for index, token in enumerate(order))
        for order in itertools.permutations(q.token_ids)
    }
    assert set(observed) <= set(expected), "all three, each once"
    found = scipy.stats.chisquare(
        [observed[order] for order in expected], [size * weight for weight in expected.values()]
    )
    assert found.pvalue > 1e-4


def share(q: DraftDistribution, token: int) -> float:
    return q.weights[q.token_ids.index(token)] / sum(q.weights)


def test_the_first_of_several_draws_equals_a_single_draw() -> None:
    ids, weights = quantise(torch.randn(50, 9, generator=torch.Generator().manual_seed(3)), 9)
    one, many = (draw(ids, weights, [5] * 50, range(50), count) for count in (1, 3))
    assert torch.equal(one[:, 0], many[:, 0])


def test_where_few_tokens_are_possible_there_are_few_siblings() -> None:
    ids, weights = quantise(torch.tensor([[0.0, -math.inf, 2.0, -math.inf]]), 4)
    tokens = draw(ids, weights, [3], [0], 3)[0].tolist()
    assert {*tokens[:2]} == {0, 2} and tokens[2] == -1


class Saying:
    """An engine whose model says the same at every place."""

    def __init__(self, logits: list[float]) -> None:
        self._row = torch.tensor(logits)
        self.model = SimpleNamespace(vocabulary_size=len(logits))
        self.kv = KVCache(BlockPool(64, 16), 1000)

    def forward(self, segments: list[Segment]) -> ModelOutput:
        for segment in segments:
            segment.sequence.ahead = segment.tokens
        return ModelOutput(self._row.repeat(sum(segment.logit_rows for segment in segments), 1))


def grown(rule: str, temperature: float, steps: int, logits: tuple[float, ...] = (0.0, 1.0, -2.0)) -> DraftSession:
    """A session after some steps of the drafting loop."""
    sampling = SamplingParams(temperature=temperature, seed=11, acceptance=rule)
    session = DraftSession(1, sampling, DraftPolicy(12, 0.0), [1, 2], 2, 100, number=7)
    proposer = ModelProposer(Saying(list(logits)), width=3, proposal_tokens=32)  # type: ignore[arg-type]
    for _ in range(steps):
        (start,) = session.frontier(1)
        start.expanded = True
        nodes = session.tree.above([start])
        (answer,) = proposer.propose([session.context(nodes, [start], 100)])
        assert isinstance(answer, Proposal)
        session.join([session.tree.root, *nodes], answer.nodes)
    return session


def test_each_node_carries_the_distribution_it_was_drawn_from_given_its_earlier_siblings() -> None:
    session = grown("rejection", 1.0, 3)
    nodes = list(session.tree.nodes())
    assert len(nodes) == 9
    for parent in (session.tree.root, *nodes):
        before: list[int] = []
        for child in parent.children.values():
            assert child.distribution is not None
            checked(child.distribution.token_ids, child.distribution.weights, 3)
            assert set(child.distribution.token_ids) == {0, 1, 2} - set(before)
            before.append(child.token)
            assert child.token in child.distribution.token_ids
    assert [node.number for node in sorted(nodes, key=lambda node: node.number)] == [*range(1, len(nodes) + 1)]


def test_draws_have_noise_of_their_own_at_every_node_and_in_every_generation_and_opening() -> None:
    """With the q of all places the same, only noise makes draws differ."""
    many = tuple(0.0 for _ in range(30))
    session = grown("rejection", 1.0, 4, logits=many)
    assert len({node.token for node in session.tree.nodes()}) > 4  # four families of three
    first = next(iter(session.tree.root.children.values()))
    elsewhere = next(token for token in range(30) if token not in first.children)
    streams = {session.stream}
    session.commit(2, [first.token, elsewhere])
    streams.add(session.stream)
    session.number = 8
    streams.add(session.stream)
    session.epoch = 2
    streams.add(session.stream)
    assert len(streams) == 4


def test_where_p_is_one_hot_so_is_q() -> None:
    session = grown("rejection", 0.0, 3)
    assert [(node.token, node.distribution) for node in session.tree.nodes()] == [
        (1, DraftDistribution((1,), (MAX_WEIGHT,)))
    ] * 3


@pytest.mark.parametrize(
    "proposal",
    [
        DraftDistribution((), ()),
        DraftDistribution((1,), (1, 2)),
        DraftDistribution((1, 1), (1, 2)),
        DraftDistribution((1, 2, 3, 3), (1, 2, 3, 4)),
        DraftDistribution((10,), (1,)),
        DraftDistribution((-1,), (1,)),
        DraftDistribution((1,), (0,)),
        DraftDistribution((1,), (MAX_WEIGHT + 1,)),
        DraftDistribution(tuple(range(257)), (1,) * 257),
    ],
)
def test_a_proposal_that_no_honest_drafter_sends_is_refused(proposal: DraftDistribution) -> None:
    with pytest.raises(InvalidArgument):
        checked(proposal.token_ids, proposal.weights, 10 if len(proposal.token_ids) < 257 else 1000)


def test_the_longest_proposal_and_the_least_weight_are_taken() -> None:
    longest = DraftDistribution(tuple(range(MAX_TOKENS)), (1,) * MAX_TOKENS)
    assert checked(longest.token_ids, longest.weights, MAX_TOKENS) == longest
