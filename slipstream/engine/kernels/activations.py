"""Functions of single numbers whose bits depend on the number alone.

Torch's own differ in the last bit between the numbers that fill its vectors and those that are left at the end of an
array, or of a thread's part of it: how many rows a pass has would show in them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import KINDS, Kernels

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
}
"""Torch's own by the name of ours, in the order of activations.h."""
_NUMBERS = {name: number for number, name in enumerate(FUNCTIONS)}


class Activation(torch.nn.Module):
    """x -> one of FUNCTIONS, in any shape."""

    def __init__(self, kernels: Kernels, name: str) -> None:
        super().__init__()
        self._activate, self._threads = kernels.activate, kernels.threads
        self._name, self._number = name, _NUMBERS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = KINDS.get(x.dtype)
        if kind is None or not x.is_cpu:
            return FUNCTIONS[self._name](x)
        x = x.contiguous()
        y = torch.empty_like(x)
        threads = torch.get_num_threads()
        self._activate(self._number, x.data_ptr(), y.data_ptr(), x.numel(), kind, compiled.FEW, threads, self._threads)
        return y
