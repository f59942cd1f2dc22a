"""A head's packed layers compute what torch's do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.proposers.packed_linear import PackedLinear, pack


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(96, 160, dtype=dtype), nn.SiLU(), nn.Linear(160, 96, bias=False, dtype=dtype)
        )
        self.output = nn.Linear(96, 300, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(x + self.inner(x))
        return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("shape", [(1, 96), (1, 1, 96), (1, 4, 96), (2, 9, 96), (0, 96)])
@torch.inference_mode()
def test_packed_layers_compute_what_torchs_do(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    block, x = Block(dtype), torch.randn(shape, dtype=dtype)
    expected = block(x).float()
    pack(block)
    assert sum(isinstance(each, PackedLinear) for each in block.modules()) == 3
    assert not any(type(each) is nn.Linear for each in block.modules())
    found = block(x).float()
    assert found.shape == expected.shape
    assert found.numel() == 0 or float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(2)
    block, rows = Block(torch.float32), torch.randn(6, 96)
    pack(block)
    together = block(rows)
    assert torch.equal(together[2:4], block(rows[2:4]))
