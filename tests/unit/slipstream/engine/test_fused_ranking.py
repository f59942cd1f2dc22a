"""The kernels that rank a draft model's tokens on a GPU, run by Triton's interpreter, rank as torch's operators do."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from slipstream.engine.sampler import coupled_sampling, fused, fused_ranking
from slipstream.engine.sampler.logits_processor import SampledRow, process
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.fused_rows import hard_logits

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch came without Triton")


def _stable(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The shortlist with the lowest ids of equal logits, which `topk` leaves open."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :width], ids[:, :width]


def _samplings(size: int, chance: np.random.Generator) -> list[SamplingParams]:
    """Every fifth row greedy; cuts of all sizes that the kernels do."""

    def one() -> SamplingParams:
        top_k = int(chance.choice([0, 0, 1, 3, 40, 256, 300]))
        return SamplingParams(
            temperature=float(chance.choice([0.0, 0.3, 0.8, 1.0, 1.7])) if chance.random() < 0.95 else 1e-38,
            seed=int(chance.integers(1 << 60)),
            top_k=top_k,
            top_p=1.0 if top_k > fused_ranking.SHORT else float(chance.choice([1.0, 0.5, 0.9, 0.999, 1e-9])),
            min_p=float(chance.choice([0.0, 0.0, 0.02, 0.5, 1.0])),
        )

    return [one() for _ in range(size)]


def _assert_equal(logits: torch.Tensor, samplings: Sequence[SamplingParams], count: int, sharpness: float) -> int:
    """Returns how many tokens were compared."""
    positions = list(range(50, 50 + len(samplings)))
    tokens, sure = fused_ranking.rank(logits, samplings, positions, count, sharpness)
    processed = process(logits.float(), [SampledRow(each) for each in samplings])
    greedy, seeds = [each.greedy for each in samplings], [each.seed for each in samplings]
    expected, expected_sure = coupled_sampling.rank(processed, greedy, seeds, positions, count, sharpness)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(sure, expected_sure, rtol=1e-5, atol=2e-5)
    return int((tokens >= 0).sum())


@pytest.fixture
def stable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled_sampling, "_shortlist", _stable)


@pytest.mark.usefixtures("stable")
@pytest.mark.parametrize("seed", range(4))
def test_kernels_rank_torchs_tokens_on_hard_logits_under_all_settings(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks and little room, so that rows have several and do not always fit."""
    for name, number in (("BLOCK", 256), ("GROUP", 32), ("CHUNK", 512), ("CAPACITY", 300)):
        monkeypatch.setattr(fused_ranking, name, number)
    chance = np.random.default_rng(seed)
    logits = hard_logits(32, int(chance.integers(600, 1000)), chance)
    compared = _assert_equal(
        logits, _samplings(32, chance), int(chance.integers(1, 9)), float(chance.choice([0.7, 1.5]))
    )
    assert compared > 20


@pytest.mark.usefixtures("stable")
@pytest.mark.parametrize("size", [40, 257])
def test_vocabularies_of_about_a_shortlist(size: int) -> None:
    chance = np.random.default_rng(size)
    assert _assert_equal(hard_logits(24, size, chance), _samplings(24, chance), 4, 1.5) > 20


@pytest.mark.usefixtures("stable")
@pytest.mark.parametrize("sharpness", [0.7, 1.5])
def test_scores_below_the_least_float_are_impossible(sharpness: float) -> None:
    """What the least temperature makes of a token's penalty."""
    logits = torch.full((2, 300), -3e38)
    logits[:, :4] = torch.tensor([0.0, -2.5e38, -1e38, -2e38])
    rows = [SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0.0)]
    assert _assert_equal(logits, rows, 4, sharpness) == (8 if sharpness < 1.0 else 6)


@pytest.mark.usefixtures("stable")
@pytest.mark.parametrize(
    "vocabulary", [40_064, *(pytest.param(each, marks=pytest.mark.slow) for each in (128_256, 151_936))]
)
def test_kernels_rank_torchs_tokens_over_large_vocabularies(vocabulary: int) -> None:
    chance = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(chance.normal(0.0, 3.0, (5, vocabulary)).astype(np.float32)).bfloat16()
    settings = [(0.0, 0, 1.0), (0.8, 0, 1.0), (0.8, 0, 0.9), (0.8, 50, 0.95), (1.0, 0, 0.2)]
    rows = [SamplingParams(temperature=t, top_k=k, top_p=p, seed=9) for t, k, p in settings]
    assert _assert_equal(logits, rows, 4, 1.5) > 15


def test_top_p_of_a_wide_top_k_and_long_rankings_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "fuses", lambda logits: True)
    logits = torch.zeros(1, 1000)
    assert fused_ranking.ranks(logits, [SamplingParams(temperature=0.5, top_k=300)], 4)
    assert not fused_ranking.ranks(logits, [SamplingParams(temperature=0.5, top_k=300, top_p=0.5)], 4)
    assert not fused_ranking.ranks(logits, [SamplingParams()], 257)
