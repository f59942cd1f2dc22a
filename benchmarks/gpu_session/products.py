"""Products of one row and of eight with weights in 16, 8 and 4 bits, as shares of what memory delivers."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_session.timing import Bench, Figures
from slipstream.engine.kernels.triton_launch import available

ROWS = (1, 8)
PADDED = 16
"""Rows that fp8 products take at least."""


def measure(bench: Bench) -> Figures:
    features, depth = (128, 256) if bench.small else (8192, 8192)
    torch.manual_seed(0)
    weights = torch.randn(features, depth, device=bench.device).mul_(depth**-0.5).bfloat16()
    bandwidth, found = bench.bandwidth(), Figures()
    found["GB/s of memory"] = bandwidth / 1e9

    def share(name: str, seconds: float, nbytes: int) -> None:
        found[f"{name}, us"], found[f"{name}, share of bandwidth"] = 1e6 * seconds, nbytes / seconds / bandwidth

    for rows in ROWS:
        x = torch.randn(rows, depth, device=bench.device).bfloat16()
        share(f"bf16, {rows} rows", bench.seconds(partial(torch.mm, x, weights.T)), weights.nbytes)
        if bench.device.type == "cuda":
            share(f"fp8, {rows} rows", bench.seconds(_fp8(x, weights)), weights.nbytes // 2)
        if available():
            from benchmarks.gpu_session.kernels import pack, product, unpack

            packed, scales = pack(weights)
            given = x if bench.device.type == "cuda" else x.float()  # the interpreter has no bf16 products
            exact = given.float() @ unpack(packed, scales).T
            worst = (product(given, packed, scales).float() - exact).abs().max() / exact.abs().max()
            found[f"4 bits, {rows} rows, largest error"] = float(worst)
            seconds = bench.seconds(partial(product, given, packed, scales), 2 if bench.small else 30)
            share(f"4 bits, {rows} rows", seconds, packed.nbytes + scales.nbytes)
    return found


def _fp8(x: torch.Tensor, weights: torch.Tensor) -> partial[torch.Tensor]:
    kind = torch.float8_e4m3fn
    rows = torch.zeros(PADDED, x.shape[-1], device=x.device, dtype=kind)
    rows[: len(x)] = x.to(kind)
    one = torch.ones((), device=x.device)
    return partial(torch._scaled_mm, rows, weights.to(kind).T, one, one, out_dtype=torch.bfloat16)
