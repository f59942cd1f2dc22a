"""The likeliest tokens of rows by the installed kernel: what torch's operators say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.kernels import ranking
from slipstream.engine.kernels.ranking import MOST_RANKS, rank_likeliest, ranks
from tests.support.kernels import compile_kernels, kernels


@pytest.fixture(scope="module", autouse=True)
def own_kernels() -> object:
    with pytest.MonkeyPatch.context() as patch:
        found = kernels(compile_kernels(), False)
        patch.setattr(ranking, "find_kernels", lambda: found)
        yield


def expected(row: torch.Tensor, count: int, sharpness: float) -> tuple[list[int], list[float]]:
    """In float64, ties to the lowest id."""
    order = sorted(range(len(row)), key=lambda token: (-row[token].item(), token))[:count]
    if row.isnan().any() or not row.max().isfinite():
        return [-1] * count, [-math.inf] * count
    confidence = (row.double() * sharpness).log_softmax(-1)
    possible = [token if (row[token] - row.max()) * sharpness > -math.inf else -1 for token in order]  # in float32
    return possible, [confidence[token].item() if token >= 0 else -math.inf for token in possible]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**63 - 1),
    width=st.integers(1, 200),
    count=st.integers(1, MOST_RANKS),
    scale=st.sampled_from([0.0, 0.3, 4.0, 30.0, 1e30, 2e38]),
    masked=st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    ties=st.booleans(),
    sharpness=st.sampled_from([0.5, 1.0, 1.5]),
    broken=st.sampled_from([None, math.nan, math.inf]),
)
def test_the_best_come_first_with_their_softmax(
    seed: int, width: int, count: int, scale: float, masked: float, ties: bool, sharpness: float, broken: float | None
) -> None:
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, width, generator=chance) * scale
    logits = logits.round() if ties else logits
    logits[torch.rand(3, width, generator=chance) < masked] = -math.inf
    if broken is not None:
        logits[1, int(torch.randint(width, (1,), generator=chance))] = broken
    count = min(count, width)
    assert ranks(logits, count)
    tokens, confidences = rank_likeliest(logits, count, sharpness)
    for row, found, sure in zip(logits, tokens.tolist(), confidences, strict=True):
        best, values = expected(row, count, sharpness)
        assert found == best
        assert torch.allclose(sure.double(), torch.tensor(values, dtype=torch.float64), rtol=1e-5, atol=1e-4)
        assert (sure <= 0.0).all()


def test_a_whole_vocabulary_and_rows_that_lie_apart() -> None:
    logits = torch.randn(5, 2 * 50_021, generator=torch.Generator().manual_seed(3))[:, ::2]
    tokens, confidences = rank_likeliest(logits, 4, 1.0)
    values, ids = logits.log_softmax(-1).topk(4)
    assert torch.equal(tokens, ids)
    assert torch.allclose(confidences, values, atol=1e-5)
    assert rank_likeliest(logits[:0], 4, 1.0)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("logits", "count"),
    [(torch.zeros(1, 9), 10), (torch.zeros(1, 90), MOST_RANKS + 1), (torch.zeros(1, 9).double(), 2)],
)
def test_logits_that_the_kernel_cannot_rank_are_left_to_torch(logits: torch.Tensor, count: int) -> None:
    assert not ranks(logits, count)
