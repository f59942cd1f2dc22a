"""Rows of all settings and hard logits, and what torch's operators and the fused kernels choose in them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from slipstream.engine.sampler import fused
from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import CUTS, sharpen
from slipstream.speculation import noise
from slipstream.speculation.noise import Purpose


def settings_of(size: int, chance: np.random.Generator, start: int = 0) -> npt.NDArray[np.void]:
    """Every fifth row greedy; cuts of all sizes."""
    rows = np.zeros(size, fused.SETTINGS)
    rows["key"] = noise.keys(np.arange(start, start + size).astype(np.uint64), np.arange(size), Purpose.COUPLED)
    rows["mask"] = rows["place"] = -1
    rows["repetition"] = 1.0
    rows["greedy"] = chance.random(size) < 0.2
    rows["temperature"] = chance.choice(np.array([0.3, 0.8, 1.0, 1.7, 1e-38], np.float32), size)
    rows["top_k"] = chance.choice([0, 0, 1, 3, 40, 300, 10**6], size)
    rows["top_p"] = chance.choice([1.0, 1.0, 0.5, 0.9, 0.999, 1e-9], size)
    rows["floor"] = chance.choice(np.log(np.array([1e-30, 0.02, 0.5, 1.0], np.float32)), size)
    greedy = rows["greedy"] != 0
    for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("floor", -math.inf)):
        rows[name][greedy] = neutral
    return rows


def by_torch(logits: torch.Tensor, rows: npt.NDArray[np.void], start: int = 0) -> list[int]:
    size = len(rows)
    cuts = rows[list(CUTS.names or ())].astype(CUTS)
    processed = sharpen(logits.float(), rows["temperature"].astype(np.float32), cuts)
    seeds = np.arange(start, start + size).astype(np.uint64)
    return choose(processed, rows["greedy"] != 0, seeds, np.arange(size))[0].tolist()


def by_kernels(
    logits: torch.Tensor, rows: npt.NDArray[np.void], masks: npt.NDArray[np.uint8] | None = None
) -> list[int]:
    size = len(rows)
    requests = np.stack([np.arange(size), np.zeros(size, np.int64), np.ones(size, np.int64)], axis=1)
    decided = fused.decide(logits, rows, requests, np.empty(0, np.int64), masks)
    assert not decided.flags[1].any() and decided.counts.tolist() == [[1] * size, [0] * size]
    return torch.where(decided.flags[0] != 0, -1, decided.tokens[:, 0]).tolist()


def hard_logits(size: int, vocabulary: int, chance: np.random.Generator) -> torch.Tensor:
    """Peaked rows and flat ones, rows of few values and of one, rows of which most tokens are impossible, zeros of both
    signs, and rows with broken numbers."""
    plain = chance.normal(0.0, 3.0, (size, vocabulary)).astype(np.float32)
    alone = np.arange(vocabulary) == chance.integers(vocabulary, size=(size, 1))
    kinds = [
        plain,
        chance.integers(-2, 3, plain.shape),
        np.full_like(plain, 1.5),
        np.where(chance.random(plain.shape) < 0.97, -np.inf, plain),
        chance.choice(np.array([0.0, -0.0, -1.0], np.float32), plain.shape),
        plain * chance.choice([0.01, 1e30], (size, 1)),
        np.where(alone, chance.choice([np.nan, np.inf], (size, 1)), plain),
        np.where(chance.random((size, 1)) < 0.3, -np.inf, np.round(plain)),
    ]
    rows = np.arange(size)
    return torch.from_numpy(np.stack(kinds)[chance.integers(0, len(kinds), size), rows].astype(np.float32))
