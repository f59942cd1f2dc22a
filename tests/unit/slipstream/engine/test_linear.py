"""Linear layers that are joined and packed."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.models.lean_decoder import Linear, packs

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SAME_ROWS = {torch.float32: 70, torch.bfloat16: 32}
"""Most rows of a pass for which a row's bits do not depend on the others."""


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "features"), [(64, 199), (1536, 96), (2176, 64), (96, 256)])
@torch.inference_mode()
def test_a_packed_row_is_the_same_in_every_pass(width: int, features: int, dtype: torch.dtype) -> None:
    """Widths beyond 1024 are summed in blocks, whose order depends on whether a row is alone. In bf16 the kernels of
    CPUs with AMX sum in another order above SAME_ROWS rows: there a row is the same up to rounding."""
    packed = Linear([torch.nn.Linear(width, features, dtype=dtype)])
    if not packs(torch.empty(0, dtype=dtype)):
        pytest.skip("no packed kernels for the dtype on this machine")
    x = rows(70, width, dtype)
    same = x[: SAME_ROWS[dtype]]
    full = packed(same)
    for count in (1, 2, 3, 8, 17, 32, 64):
        if count <= len(same):
            assert torch.equal(packed(same[:count]), full[:count])
            assert torch.equal(packed(same[-count:]), full[-count:])
    assert torch.allclose(packed(x)[: len(same)], full, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_parts_stand_side_by_side(dtype: torch.dtype, bias: bool) -> None:
    parts = [torch.nn.Linear(40, size, bias=bias, dtype=dtype) for size in (5, 3, 8)]
    x = rows(7, 40, dtype)
    expected = torch.cat([part(x) for part in parts], dim=1)
    joined = Linear(parts)
    for count in (0, 1, 7):
        assert torch.allclose(joined(x[:count]), expected[:count], atol=TOLERANCE[dtype])
        assert joined(x[:count]).shape == (count, 16)


@pytest.mark.parametrize("keep", [False, True])
def test_the_parts_weights_are_taken_unless_they_are_tied(keep: bool) -> None:
    part = torch.nn.Linear(8, 4)
    Linear([part], keep=keep)
    assert hasattr(part, "weight") == keep


def test_what_has_no_kernel_is_not_packed() -> None:
    part = torch.nn.Linear(8, 4, dtype=torch.float64)
    x = rows(3, 8, torch.float64)
    with torch.inference_mode():
        expected = part(x)
        assert not packs(part.weight) and torch.equal(Linear([part])(x), expected)
