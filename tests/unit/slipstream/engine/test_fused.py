"""The kernels of a GPU, run by Triton's interpreter, choose the tokens that torch's operators choose on a CPU."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from benchmarks.virtual_gpu import DEVICE, VirtualGPU
from slipstream.engine.sampler import fused
from slipstream.engine.sampler.logits_processor import forbid
from tests.support.compiled_kernels import KERNELS
from tests.support.fused_rows import by_kernels, by_torch, hard_logits, settings_of
from tests.support.grammars import END, LANGUAGES, VOCABULARY, place
from verifier_svc.grammar.token_constraint import TokenConstraint, TokenRules

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch came without Triton")


@pytest.mark.parametrize("seed", range(4))
def test_kernels_choose_torchs_tokens_on_hard_logits_under_all_settings(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks and little room, so that rows have several and do not always fit."""
    for name, number in (("BLOCK", 256), ("GROUP", 32), ("CHUNK", 512), ("CAPACITY", 128)):
        monkeypatch.setattr(fused, name, number)
    chance = np.random.default_rng(seed)
    logits, rows = hard_logits(32, int(chance.integers(600, 1000)), chance), settings_of(32, chance, 100 * seed)
    expected = by_torch(logits, rows, 100 * seed)
    assert by_kernels(logits.clone(), rows) == expected
    assert -1 in expected and len(set(expected)) > 10


@pytest.mark.parametrize(
    "vocabulary", [40_064, *(pytest.param(each, marks=pytest.mark.slow) for each in (128_256, 151_936))]
)
def test_kernels_choose_torchs_tokens_over_large_vocabularies(vocabulary: int) -> None:
    chance = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(chance.normal(0.0, 3.0, (5, vocabulary)).astype(np.float32)).bfloat16()
    rows = settings_of(5, chance)
    rows["greedy"], rows["temperature"], rows["floor"] = [1, 0, 0, 0, 0], [1.0, 0.8, 0.8, 0.8, 1.0], -np.inf
    rows["top_k"], rows["top_p"] = [0, 0, 0, 50, 0], [1.0, 1.0, 0.9, 0.95, 0.999]
    assert by_kernels(logits, rows) == by_torch(logits, rows)


def test_masks_forbid_and_broken_numbers_stay_broken() -> None:
    chance = np.random.default_rng(5)
    logits, rows = hard_logits(24, 333, chance), settings_of(24, chance)
    masks = chance.integers(0, 256, (12, 42), dtype=np.uint8)
    masks[3] = 0  # nothing is allowed
    rows["mask"][::2] = np.arange(12)
    assert by_kernels(logits.clone(), rows, masks) == by_torch(forbid(logits, np.arange(0, 24, 2), masks), rows)


def test_masks_of_a_grammar_and_of_token_rules_forbid_in_one_step() -> None:
    chance = np.random.default_rng(6)
    logits, rows = hard_logits(8, VOCABULARY, chance), settings_of(8, chance)
    grammar = place(LANGUAGES["any"].structure).mask([])
    rules = TokenRules(VOCABULARY, min_length=9, stop_token_ids=[END])
    masks = [grammar, TokenConstraint(rules, [7], 1, drawn=False).after(())]
    rows["mask"][:2] = range(2)
    stacked = np.stack([mask for mask in masks if mask is not None])
    assert by_kernels(logits.clone(), rows, stacked) == by_torch(forbid(logits, np.arange(2), stacked), rows)


def test_tables_of_another_vocabulary_are_refused() -> None:
    logits, rows = torch.zeros(2, 100), settings_of(2, np.random.default_rng(0))
    with pytest.raises(ValueError, match="masks of 12 bytes for 100 logits"):
        by_kernels(logits, rows, np.zeros((1, 12), np.uint8))
    tables = fused.Adjusted(*[torch.zeros(1, 96)] * 5)
    with pytest.raises(ValueError, match="counts of 96 tokens for 100 logits"):
        fused.decide(logits, rows, np.zeros((2, 3), np.int64), np.empty(0, np.int64), None, tables)


def test_warming_up_runs_every_kernel() -> None:
    with torch.inference_mode(), VirtualGPU() as gpu:
        fused.warm_up(300, torch.bfloat16, DEVICE)
        assert set(gpu.take().launches) >= set(KERNELS)


def test_other_noise_and_other_cuts_choose_other_tokens() -> None:
    """Other noise, and other cuts, choose other tokens."""
    chance = np.random.default_rng(6)
    logits, rows = torch.from_numpy(chance.normal(0.0, 2.0, (12, 200)).astype(np.float32)), settings_of(12, chance)
    rows["greedy"], rows["top_k"], rows["top_p"], rows["floor"] = 0, 40, 1.0, -np.inf
    rows["temperature"] = 1.0
    expected = by_torch(logits, rows)
    assert by_kernels(logits, rows) == expected
    for name, other in (("key", rows["key"] + np.uint64(1)), ("top_k", 2), ("temperature", 0.2)):
        changed = rows.copy()
        changed[name] = other
        assert by_kernels(logits, changed) != expected, name
