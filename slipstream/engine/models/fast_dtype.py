"""The type that a model is computed in on a CPU where its settings leave that open: a rule over what the CPU is.

No timing takes part, so that two starts, and two machines of one kind, choose alike. Why the rule is as it is, in pairs
of passes in bfloat16 and in float32 (AVX2 without instructions for bfloat16, one thread;
benchmarks/results/floor_1_avx2.md):

- Kernels of ours read bfloat16 weights and multiply floats: half the bytes, the same products. A pass of 1 to 16 rows
  takes 0.4 to 1.06 of the time in float32, at 1 million parameters as at 135 million, and half the memory.
- Torch's own products in bfloat16 are emulated on a CPU without instructions for them, which takes several times as
  long as float32.
- Nothing here multiplies float16 on a CPU.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from functools import cache

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    dtype: torch.dtype
    why: str
    """Half a sentence for the log."""


def choose_dtype(own: torch.dtype, *, kernels: bool, native: bool) -> DtypeChoice:
    """`own`: the checkpoint's type. `kernels`: whether kernels of ours multiply all its weights. `native`: whether the
    CPU has instructions for products in bfloat16."""
    if own is torch.float16:
        return DtypeChoice(torch.float32, "this CPU has no kernels for float16")
    if own is not torch.bfloat16:
        return DtypeChoice(own, "the checkpoint's own type")
    if kernels:
        return DtypeChoice(own, "compiled kernels read its weights in it")
    if native:
        return DtypeChoice(own, "this CPU has instructions for it")
    return DtypeChoice(torch.float32, "this CPU would emulate bfloat16; it takes twice the memory")


def announced_dtype(model: str, own: torch.dtype, *, kernels: bool) -> torch.dtype:
    """The type for a model of this name on this CPU, which the log names with the reason."""
    chosen = choose_dtype(own, kernels=kernels, native=native_bfloat16())
    log.info("%s is computed in %s: %s", model, str(chosen.dtype).removeprefix("torch."), chosen.why)
    return chosen.dtype


def dtype_on(place: torch.device, own: torch.dtype) -> torch.dtype:
    """The type of a head on this device, which torch's products compute: see `choose_dtype` for a CPU, `own` else."""
    return choose_dtype(own, kernels=False, native=native_bfloat16()).dtype if place.type == "cpu" else own


@cache
def native_bfloat16() -> bool:
    """True if the CPU multiplies bfloat16: AVX512-BF16, AMX, or Arm's instructions."""
    if platform.machine() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
