"""Which tokens may win an exponential race: torch's operators take five times as long over a real vocabulary."""

from __future__ import annotations

import torch

from slipstream.engine.kernels.compiled import find_kernels

ROOM = 64
"""Tokens of a row that may win, on average at most; more than a handful are rare."""


def contenders(shifted: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """float32 [R, V] with each row's maximum taken off, and int64 keys [R] of their draws -> rows and tokens, int64
    [N], of those whose cheap time is within the bar (`slipstream.engine.sampler.coupled_sampling`). None where there is
    no kernel, and where more than ROOM of a row may win."""
    if not shifted.is_cpu or shifted.dtype is not torch.float32 or (kernels := find_kernels()) is None:
        return None
    shifted = shifted.contiguous()
    rows, width = shifted.shape
    room = rows * ROOM
    found, times = torch.empty(2, room, dtype=torch.int64), torch.empty(width)
    addresses = (times.data_ptr(), found[0].data_ptr(), found[1].data_ptr())
    count = kernels.contend(shifted.data_ptr(), rows, width, keys.data_ptr(), *addresses, room)
    return None if count < 0 else (found[0, :count], found[1, :count])
