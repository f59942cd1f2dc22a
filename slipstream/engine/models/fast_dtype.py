"""The type that a model is computed in on a CPU where its settings leave that open.

A CPU without instructions for a checkpoint's own type emulates its products. They then take longer than products in
float32, although half as many bytes are read. How much that half is worth depends on where the weights lie: a small
draft model's in the caches, a target's in memory. So as many weights are multiplied as the model has.
"""

from __future__ import annotations

import logging
import math
import time
from copy import deepcopy
from functools import cache

import torch

from slipstream.engine.models.linear import Linear

log = logging.getLogger(__name__)

ROWS, INPUTS, OUTPUTS = 8, 1024, 4096
"""A pass over a small tree, and the weights of one product."""
MOST_PRODUCTS = 16
"""Products in turn whose weights, 128 MB in bfloat16 and 256 MB in float32, stand for those of any larger model."""
LARGE = MOST_PRODUCTS * INPUTS * OUTPUTS
TRIES = 9
HALVES = (torch.bfloat16, torch.float16)


def fast_dtype(own: torch.dtype, parameters: int = LARGE) -> torch.dtype:
    """`own`, or float32 where this CPU computes a model of so many parameters in less time in it; measured once for
    each size, and said in the log. A head is LARGE however few it has: each pass of its target, between two of its own,
    drives its weights from the caches."""
    if own not in HALVES:
        return own
    return _faster(own, max(1, min(MOST_PRODUCTS, round(parameters / (INPUTS * OUTPUTS)))))


@cache
def _faster(own: torch.dtype, products: int) -> torch.dtype:
    seconds = _least_seconds((own, torch.float32), products)
    if seconds[own] <= seconds[torch.float32]:
        return own
    took, less = (f"{1e3 * seconds[dtype]:.2g}" for dtype in (own, torch.float32))
    name, megabytes = str(own).removeprefix("torch."), products * INPUTS * OUTPUTS * own.itemsize / 1e6
    log.warning(
        "this CPU is slower in %s (%s ms for %.0f MB of weights, %s in float32): computing in float32",
        *(name, took, megabytes, less),
    )
    return torch.float32


def dtype_on(place: torch.device, own: torch.dtype) -> torch.dtype:
    """The type that a head computes in on this device: see `fast_dtype` for a CPU, `own` else."""
    return fast_dtype(own) if place.type == "cpu" else own


@torch.inference_mode()
def _least_seconds(dtypes: tuple[torch.dtype, ...], products: int) -> dict[torch.dtype, float]:
    """CPU seconds of this thread for so many products in each type, the least of tries in turn."""
    parts = {dtype: torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype) for dtype in dtypes}
    # Copies: drawing numbers for so many weights takes longer than all tries.
    layers = {dtype: [Linear([deepcopy(part)]) for _ in range(products)] for dtype, part in parts.items()}
    least = dict.fromkeys(dtypes, math.inf)
    for _ in range(TRIES):
        for dtype, some in layers.items():
            rows = torch.ones(ROWS, INPUTS, dtype=dtype)
            began = time.thread_time()
            for layer in some:
                layer(rows)
            least[dtype] = min(least[dtype], time.thread_time() - began)
    return least
