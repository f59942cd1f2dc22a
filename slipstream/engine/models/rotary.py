"""Rotary position embeddings (Su et al. 2021), from tables that the library's own module computes."""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 1 << 16
"""Positions computed at a time, in fp32."""


class Rotation:
    """Turns the heads of one step's tokens."""

    def __init__(self, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        self._cosine, self._sine = cosine, sine
        self._half = cosine.shape[-1] // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, dim]."""
        return torch.addcmul(x * self._cosine, x.roll(self._half, -1), self._sine)


class Rotary:
    """Tables [length, dim] in the dtype and on the device of `like`.

    Whatever type of scaling the module computes, it is right as long as it is the same for every step; positions have
    to end where it is not (`slipstream.engine.models.checkpoint`).
    """

    def __init__(self, module: Any, like: torch.Tensor) -> None:
        self._module = module
        self._like = like[:0]
        self._cosine = self._sine = like[:0]

    def reserve(self, length: int) -> None:
        """Tables for the positions below `length`, at least; what was captured before is to be captured again."""
        if length <= len(self._cosine):
            return
        parts = [self._tables(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
        self._cosine, self._sine = (torch.cat(column) for column in zip(*parts, strict=True))

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions int64 [T]."""
        cosine, sine = self._cosine.index_select(0, positions), self._sine.index_select(0, positions)
        return Rotation(cosine.unsqueeze(1), sine.unsqueeze(1))

    @torch.inference_mode()
    def _tables(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, stop, device=self._like.device).unsqueeze(0)
        cosine, sine = (table[0] for table in self._module(self._like, position_ids=positions))
        # Rolled by half, the second half of a head comes to the place of the first one: there the sign is minus.
        half = sine.shape[-1] // 2
        return cosine, torch.cat((-sine[:, :half], sine[:, half:]), dim=-1)
