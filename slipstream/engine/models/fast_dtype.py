"""The type that a model is computed in on a CPU where its settings leave that open.

A CPU without instructions for a checkpoint's own type emulates its products. They then take longer than products in
float32, although half as many bytes are read.
"""

from __future__ import annotations

import logging
import math
import time
from functools import cache

import torch

from slipstream.engine.models.linear import Linear

log = logging.getLogger(__name__)

ROWS, INPUTS, OUTPUTS = 8, 1024, 4096
"""A pass over a small tree, and weights that do not fit in a core's own caches."""
TRIES = 9
HALVES = (torch.bfloat16, torch.float16)


@cache
def fast_dtype(own: torch.dtype) -> torch.dtype:
    """`own`, or float32 where this CPU's products in it take less time; measured once, and said in the log. Kinds of
    CPUs differ by a factor of two or more either way, so other work on the machine does not change the answer."""
    if own not in HALVES:
        return own
    seconds = _least_seconds((own, torch.float32))
    if seconds[own] <= seconds[torch.float32]:
        return own
    took, less = (f"{1e3 * seconds[dtype]:.2g}" for dtype in (own, torch.float32))
    name = str(own).removeprefix("torch.")
    log.warning("this CPU emulates %s (%s ms a product, %s in float32): computing in float32", name, took, less)
    return torch.float32


def dtype_on(place: torch.device, own: torch.dtype) -> torch.dtype:
    """The type to compute in on this device where settings leave it open: see `fast_dtype` for a CPU, `own` else."""
    return fast_dtype(own) if place.type == "cpu" else own


@torch.inference_mode()
def _least_seconds(dtypes: tuple[torch.dtype, ...]) -> dict[torch.dtype, float]:
    """CPU seconds of this thread for a product in each type, the least of tries in turn."""
    layers = {dtype: Linear([torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype)]) for dtype in dtypes}
    least = dict.fromkeys(dtypes, math.inf)
    for _ in range(TRIES):
        for dtype, layer in layers.items():
            rows = torch.ones(ROWS, INPUTS, dtype=dtype)
            began = time.thread_time()
            layer(rows)
            least[dtype] = min(least[dtype], time.thread_time() - began)
    return least
