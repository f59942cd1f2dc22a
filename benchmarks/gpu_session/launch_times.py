"""Microseconds that a launch costs: an operator of torch, a kernel in Triton, a node of a replayed graph."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_session.timing import Bench, Figures
from slipstream.engine.kernels.triton_launch import available

NODES = (300, 600)


def measure(bench: Bench) -> Figures:
    count = 20 if bench.small else 1000
    x = torch.zeros(256, device=bench.device)

    def operators(number: int) -> None:
        for _ in range(number):
            x.add_(1.0)

    found: Figures = {"us a torch operator": 1e6 * bench.seconds(partial(operators, count), 10) / count}
    if available():
        from benchmarks.gpu_session.kernels import add_one

        def kernels() -> None:
            for _ in range(count):
                add_one(x)

        found["us a Triton kernel"] = 1e6 * bench.seconds(kernels, 10) / count
    for nodes in NODES:
        replay = bench.captured(partial(operators, nodes))
        found[f"us a replay of {nodes} nodes"] = 1e6 * bench.seconds(replay)
    return found
