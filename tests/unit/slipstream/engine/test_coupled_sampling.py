"""The shortcut of `choose` gives exactly what scoring every token in float64 gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.sampler import coupled_sampling, torch_noise
from slipstream.engine.sampler.coupled_sampling import choose, rank
from slipstream.speculation.noise import Purpose


def naive(logits: torch.Tensor, greedy: Sequence[bool], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    keys = torch_noise.keys(seeds, positions, Purpose.COUPLED)[:, None]
    tokens = torch.arange(logits.shape[-1])
    scores = (logits - logits.amax(-1, keepdim=True)).double() + torch_noise.gumbel(keys, tokens)
    chosen = []
    for row, row_scores, is_greedy in zip(logits, scores, greedy, strict=True):
        values = row.double() if is_greedy else row_scores
        chosen.append(int((values == values.max()).nonzero()[0]))
    return chosen


def random_logits(seed: int, rows: int, vocabulary: int, scale: float, masked: float, ties: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    if ties:
        logits = logits.round()
    holes = torch.rand(rows, vocabulary, generator=generator) < masked
    holes[torch.arange(rows), torch.randint(vocabulary, (rows,), generator=generator)] = False
    return logits.masked_fill(holes, -math.inf)


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**63),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 300)),
    scale=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 4.0, 30.0, 1e4, 1e30]),
    masked=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    ties=st.booleans(),
    block=st.sampled_from([1, 500, 1 << 17]),
)
def test_choose_equals_the_naive_computation(
    seed: int, shape: tuple[int, int], scale: float, masked: float, ties: bool, block: int
) -> None:
    logits = random_logits(seed, *shape, scale, masked, ties)
    greedy = [(seed >> row) % 3 == 0 for row in range(shape[0])]
    seeds, positions = [seed + row for row in range(shape[0])], [row * 7 for row in range(shape[0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coupled_sampling, "_BLOCK", block)
        tokens, broken = choose(logits, greedy, seeds, positions)
    assert tokens.tolist() == naive(logits, greedy, seeds, positions)
    assert not broken.any()


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("masked", [0.0, 0.99])
def test_choose_equals_the_naive_computation_on_a_large_vocabulary(scale: float, masked: float) -> None:
    logits = random_logits(1, 16, 20_000, scale, masked, ties=False)
    greedy, seeds, positions = [False] * 16, list(range(16)), [5] * 16
    assert choose(logits, greedy, seeds, positions)[0].tolist() == naive(logits, greedy, seeds, positions)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    tokens, _ = choose(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]]), [True, True], [0, 0], [0, 0])
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_broken_row_is_flagged_and_harms_no_other(poison: float, is_greedy: bool) -> None:
    logits = random_logits(3, 5, 100, 2.0, 0.3, ties=False)
    expected = choose(logits, [is_greedy] * 5, range(5), range(5))[0]
    logits[2, slice(None) if poison == -math.inf else 17] = poison
    tokens, broken = choose(logits, [is_greedy] * 5, range(5), range(5))
    assert broken.tolist() == [False, False, True, False, False]
    assert tokens[2] == -1
    assert torch.equal(tokens[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_choices_do_not_depend_on_the_batch() -> None:
    logits = random_logits(4, 8, 1000, 2.0, 0.2, ties=False)
    together, _ = choose(logits, [False] * 8, range(8), range(8))
    alone = [int(choose(logits[row : row + 1], [False], [row], [row])[0]) for row in range(8)]
    assert together.tolist() == alone


def test_choices_follow_the_softmax() -> None:
    logits = torch.tensor([1.5, 0.0, -1.0, 0.5, -math.inf, -2.0])
    size = 30_000
    tokens, _ = choose(logits.expand(size, -1).contiguous(), [False] * size, [9] * size, range(size))
    observed = np.bincount(tokens.numpy(), minlength=6)
    expected = logits.softmax(-1).double().numpy() * size
    assert observed[4] == 0
    keep = expected > 0
    assert (
        scipy.stats.chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue
        > 1e-4
    )


def test_a_drafter_with_the_targets_logits_ranks_the_targets_choice_first() -> None:
    logits = random_logits(5, 12, 200, 2.0, 0.2, ties=False)
    greedy = [row % 2 == 0 for row in range(12)]
    tokens, _ = choose(logits, greedy, range(12), range(12))
    ranked, confidences = rank(logits, greedy, range(12), range(12), 3)
    assert ranked[:, 0].tolist() == tokens.tolist()
    assert bool((confidences <= 0.0).all())
    assert bool((confidences[:, :-1] >= confidences[:, 1:]).all())


def test_greedy_confidence_is_the_log_softmax() -> None:
    logits = random_logits(6, 3, 1000, 2.0, 0.0, ties=False)
    ranked, confidences = rank(logits, [True] * 3, [0] * 3, [0] * 3, 4)
    assert torch.allclose(confidences, logits.log_softmax(-1).gather(1, ranked), atol=1e-5)


@pytest.mark.parametrize("sharpness", [1.0, 1.5])
def test_sampled_confidence_is_the_log_softmax_of_sharpened_scores(sharpness: float) -> None:
    logits = random_logits(7, 3, 200, 2.0, 0.0, ties=False)
    ranked, confidences = rank(logits, [False] * 3, range(3), range(3), 4, sharpness)
    keys = torch_noise.keys(range(3), range(3), Purpose.COUPLED)
    scores = logits.double() + torch_noise.gumbel(keys[:, None], torch.arange(200).expand(3, -1))
    assert torch.allclose(confidences.double(), (scores * sharpness).log_softmax(-1).gather(1, ranked), atol=1e-5)


def test_greedy_rows_alone_are_ranked_without_noise_and_as_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(9, 4, 2000, 2.0, 0.1, ties=False)
    among = rank(logits, [True, True, True, False], range(4), range(4), 5, 1.3)
    monkeypatch.delattr(torch_noise, "gumbel")
    alone = rank(logits[:3], [True] * 3, range(3), range(3), 5, 1.3)
    for left, right in zip(among, alone, strict=True):
        assert torch.equal(left[:3], right)


def test_rank_marks_what_is_impossible() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf], [math.nan, 0.0, 0.0], [-math.inf] * 3])
    for greedy in (True, False):
        ranked, confidences = rank(logits, [greedy] * 3, [1] * 3, [1] * 3, 3)
        assert sorted(ranked[0].tolist()) == [-1, 0, 1]
        assert ranked[1:].tolist() == [[-1] * 3] * 2
        assert bool((confidences.isneginf() == (ranked == -1)).all())


@pytest.mark.parametrize("greedy", [True, False])
def test_a_token_whose_confidence_no_float_holds_is_impossible(greedy: bool) -> None:
    """What a temperature of 1e-38 makes of penalties: a frame with such a candidate is one that no drafter may send."""
    logits = torch.full((1, 300), -3e38)
    logits[0, :3] = torch.tensor([0.0, -2.5e38, -1e38])
    ranked, confidences = rank(logits, [greedy], [1], [1], 4, 1.5)
    assert ranked.tolist() == [[0, 2, -1, -1]] and confidences.isfinite().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(("left", "by_numpy"), [(1, False), (20, False), (1000, False), (4999, True)])
def test_rank_looks_for_the_likeliest_in_the_way_that_is_fast_for_what_a_cut_left(
    left: int, by_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coupled_sampling, "ranks", lambda *_: False)  # as without kernels
    select = mock.Mock(wraps=np.argpartition)
    monkeypatch.setattr(coupled_sampling.np, "argpartition", select)
    logits = random_logits(7, 6, 5000, 2.0, 0.0, ties=False)
    best = logits.topk(left)
    logits.masked_fill_(logits < best.values[:, -1:], -math.inf)
    ranked, _ = rank(logits, [True] * 6, [0] * 6, [0] * 6, 4)
    assert ranked[:, : min(left, 4)].tolist() == best.indices[:, :4].tolist()
    assert bool((ranked[:, left:] == -1).all())
    assert select.called == by_numpy


def test_rank_gives_no_more_than_the_vocabulary() -> None:
    assert rank(torch.zeros(1, 2), [True], [0], [0], 5)[0].shape == (1, 2)


def test_coupled_acceptance_meets_its_formula() -> None:
    """P(accept) = sum_i 1 / sum_j max(p_j/p_i, q_j/q_i) (Daliri, Musco and Suresh 2024)."""
    size = 30_000
    p, q = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.3, 0.4, 0.1, 0.2])
    positions = range(size)
    target, _ = choose(p.log().expand(size, -1).contiguous(), [False] * size, [1] * size, positions)
    draft, _ = choose(q.log().expand(size, -1).contiguous(), [False] * size, [1] * size, positions)
    expected = sum(1.0 / float(torch.maximum(p / p[i], q / q[i]).sum()) for i in range(4))
    accepted = int((target == draft).sum())
    assert scipy.stats.binomtest(accepted, size, expected).pvalue > 1e-4
    distance = float((p - q).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) - 0.01 <= accepted / size <= 1 - distance + 0.01
