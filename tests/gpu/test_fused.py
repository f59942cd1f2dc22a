"""The fused kernels, compiled: the tokens that torch's operators choose on a CPU, without waiting for the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.fused_rows import by_kernels, by_torch, hard_logits, settings_of


@pytest.mark.parametrize("vocabulary", [1000, 32_000, 151_936])
def test_kernels_choose_the_same_tokens(vocabulary: int) -> None:
    chance = np.random.default_rng(vocabulary)
    logits, rows = hard_logits(64, vocabulary, chance), settings_of(64, chance)
    masks = chance.integers(0, 256, (32, -(-vocabulary // 8)), dtype=np.uint8)
    assert by_kernels(logits.cuda(), rows) == by_torch(logits, rows)
    rows["mask"][::2] = np.arange(32)
    allowed = torch.from_numpy(np.unpackbits(masks, axis=-1, count=vocabulary, bitorder="little") != 0)
    logits[::2] += torch.where(allowed, 0.0, -torch.inf)
    assert by_kernels(logits.cuda(), rows, masks) == by_torch(logits, rows)
