"""Norms of few rows: in torch they are several operators, which together take longer than their memory does."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from slipstream.engine.kernels.compiled import KINDS, find_kernels


class RmsNorm:
    """Zhang and Sennrich 2019, Root Mean Square Layer Normalization; over the last dimension, in fp32 and rounded once.
    torch computes where there is no kernel."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        """weight [width]."""
        self._weight, self.epsilon = weight, epsilon
        kernels = find_kernels() if weight.device.type == "cpu" and weight.dtype in KINDS else None
        self._kernel = None if kernels is None else kernels.rms_norm
        self._floats = weight.float().contiguous()
        self.address = self._floats.data_ptr()
        """Where its weight stands in fp32."""
        self._kind = KINDS.get(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width], in any layout; the result is contiguous."""
        weight = self._weight
        if self._kernel is None or x.dtype is not weight.dtype or x.shape[-1] != len(weight) or not x.is_cpu:
            return rms_norm(x, weight.shape, weight, self.epsilon)
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        rows = x.numel() // width
        self._kernel(x.data_ptr(), self.address, out.data_ptr(), rows, width, self.epsilon, self._kind)
        return out
