"""Kernels in Triton: compiled where there is a GPU, elsewhere run by Triton's interpreter on the CPU, for tests.

Import it only where `available()`: torch's builds for GPUs bring Triton, others do not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves

WARPS = 8


@cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


def jit(function: Callable[..., Any], *, varying: Sequence[str] = ()) -> Any:
    """`triton.jit`, or the interpreter's where torch sees no GPU. `varying`: numbers that change from step to step, of
    which no value is compiled for."""
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    if torch.cuda.is_available():
        return triton.jit(function, do_not_specialize=list(varying))

    class Interpreted(InterpretedFunction):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> Any:
            """For a call by another kernel, which has patched Triton's language already: each time costs 2 ms."""
            return self.rewrite()(*args, **options)

    return Interpreted(function)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Modes of torch (`torch.overrides`) see it as one of torch's functions.

    Products and sums are rounded one by one, as torch's operators round them: the compiler must not fuse them.
    """
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    if has_torch_function(tensors):
        handle_torch_function(launch, tensors, kernel, grid, *args, **constants)
        return
    with np.errstate(all="ignore"):  # of the interpreter; a GPU does not warn either
        kernel[grid](*args, **constants, enable_fp_fusion=False, num_warps=WARPS)
