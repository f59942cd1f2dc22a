"""Cosines and sines of positions as the library's rotary modules compute them, each with the same bits always.

Torch computes the end of an array, and of each thread's part of it, by other instructions than the rest: cosines of a
position would depend on how many positions are asked for and on the number of threads. So they are computed ROWS at a
time by one thread, however many are wanted.
"""

from __future__ import annotations

from typing import Any

import torch

ROWS = 4096
"""Positions."""


@torch.inference_mode()
def rotation_tables(module: Any, like: torch.Tensor, length: int, *rest: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    """Computes the module's tables for the positions below `length`, [length, dim] each, in the type and on the device
    of `like`. Whatever type of scaling it computes, positions beyond are not asked for."""
    parts, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for first in range(0, length, ROWS):
            positions = torch.arange(first, first + ROWS, device=like.device).clamp(max=length - 1).unsqueeze(0)
            found = module(like, positions, *rest, **more)
            parts.append(tuple(each[0] for each in (found if isinstance(found, tuple) else (found,))))
    finally:
        torch.set_num_threads(threads)
    return tuple(torch.cat(column)[:length] for column in zip(*parts, strict=True))
