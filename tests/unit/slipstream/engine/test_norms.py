"""Norms of rows by the installed kernels, which are torch's where none are."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from slipstream.engine.kernels.norms import RmsNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 64, 133])
@torch.inference_mode()
def test_a_row_has_the_mean_square_of_its_weight_alone_or_among_others(width: int, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(width)
    weight = torch.randn(width, generator=chance).to(dtype)
    x = (3 * torch.randn(9, 5, width, generator=chance)).to(dtype)
    norm = RmsNorm(weight, 1e-5)
    found = norm(x)
    expected = rms_norm(x.double(), (width,), weight.double(), 1e-5)
    assert found.dtype is dtype
    assert torch.allclose(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(norm(x[:, 2]), found[:, 2])
    assert torch.equal(norm(x[4, :1]), found[4, :1])
    assert norm(x[:0]).shape == (0, 5, width)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x = torch.ones(3, 20, dtype=dtype)
    x[1, 17] = float("nan")
    found = RmsNorm(torch.ones(20, dtype=dtype), 0.0)(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], torch.ones(2, 20, dtype=dtype))
    assert (RmsNorm(torch.ones(20, dtype=dtype), 1e-5)(torch.zeros(1, 20, dtype=dtype)) == 0).all()
