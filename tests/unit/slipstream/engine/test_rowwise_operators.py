"""Torch's operators that the library's path keeps: a row alone has the bits that it has among others.

`slipstream.engine.models.packed_library.ROWWISE` rests on it, on every processor that has our kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

COUNTS = (2, 3, 8, 33)
WIDTHS = (*range(1, 41), 96, 100, 576, 2880)
ROWWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of squares": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "softmax in fp32": lambda x: x.softmax(-1, dtype=torch.float32),
    "layer_norm": lambda x: layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: rms_norm(x, x.shape[-1:]),
    "cumsum": lambda x: x.cumsum(-1),
    "root": lambda x: x.float().abs().add(1e-6).rsqrt(),
    "power": lambda x: x.float().abs().add(1e-6).pow(-0.5),
    "of heads": lambda x: x.repeat(1, 1, 2).view(1, -1, 2, x.shape[-1])[:, :, 1].mean(-1, keepdim=True),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROWWISE)
@torch.inference_mode()
def test_a_row_alone_is_the_row_among_others(name: str, dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in WIDTHS:
            x = (3 * torch.randn(1, max(COUNTS), width, generator=torch.Generator().manual_seed(width))).to(dtype)
            alone = torch.cat([ROWWISE[name](x[:, row : row + 1].clone()) for row in range(max(COUNTS))], dim=1)
            for count in COUNTS:
                assert torch.equal(ROWWISE[name](x[:, :count].clone()), alone[:, :count]), (width, count)
    finally:
        torch.set_num_threads(before)
