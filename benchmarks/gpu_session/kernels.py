# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
"""Kernels in Triton that only this session measures: an addition, and a product with weights of four bits."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from slipstream.engine.kernels.triton_launch import jit, launch

GROUP = 128
"""Input features that share a scale."""
ROWS, FEATURES, DEPTH = 16, 64, 128
"""A program's tile. Fewer rows are filled up with zeros: tensor cores take 16."""


@jit
def _add_one(x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < size) + 1.0, mask=at < size)


def add_one(x: Tensor) -> None:
    launch(_add_one, (1,), x, x.numel(), BLOCK=256)


@jit
def _product(x, packed, scales, y, depth, features, rows,
             ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """y [rows, features] = x [rows, depth] * weights [features, depth], eight of them in an int32."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    sums = tl.full((ROWS, FEATURES), 0.0, tl.float32)
    for first in range(0, depth, DEPTH):
        at = first + tl.arange(0, DEPTH)
        words = tl.load(packed + feature[None, :] * (depth // 8) + at[:, None] // 8)
        weights = ((words >> (at[:, None] % 8 * 4)) & 15).to(tl.float32) - 8.0
        weights *= tl.load(scales + feature[None, :] * (depth // GROUP) + at[:, None] // GROUP).to(tl.float32)
        some = tl.load(x + row[:, None] * depth + at[None, :], mask=row[:, None] < rows, other=0.0)
        sums += tl.dot(some, weights.to(some.dtype))
    tl.store(y + row[:, None] * features + feature[None, :], sums.to(y.dtype.element_ty), mask=row[:, None] < rows)


def product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x [R, K] of at most 16 rows, packed int32 [N, K / 8], scales [N, K / GROUP] -> [R, N].

    K is a multiple of GROUP, N of FEATURES.
    """
    rows, depth = x.shape
    features = packed.shape[0]
    y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    tile = {"ROWS": ROWS, "FEATURES": FEATURES, "DEPTH": DEPTH, "GROUP": GROUP}
    launch(_product, (features // FEATURES,), x, packed, scales, y, depth, features, rows, **tile)
    return y


def pack(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [N, K] as four bits each, -8 to 7 times a scale of their group."""
    features, depth = weights.shape
    groups = weights.float().view(features, depth // GROUP, GROUP)
    scales = groups.abs().amax(-1, keepdim=True).div(7.0).clamp(min=1e-8)
    whole = groups.div(scales).round().clamp(-8, 7).long().add(8).view(features, depth // 8, 8)
    shifts = 4 * torch.arange(8, device=weights.device)
    words = (whole << shifts).sum(-1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32), scales[..., 0].to(weights.dtype)


def unpack(packed: Tensor, scales: Tensor) -> Tensor:
    """What `product` multiplies with, in float32 [N, K]."""
    shifts = 4 * torch.arange(8, device=packed.device)
    whole = ((packed[..., None] >> shifts) & 15).float().sub(8.0)
    return whole.view(len(packed), -1, GROUP).mul(scales.float()[..., None]).view(len(packed), -1)
