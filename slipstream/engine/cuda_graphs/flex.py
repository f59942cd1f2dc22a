"""The attention kernel of the paged plan: PyTorch's FlexAttention over the rows of the whole pool.

What FlexAttention's short-query kernel asks for (torch 2.13, `torch/_inductor/kernel/flex/flex_decoding.py`):

- fewer than 128 query rows for each KV head, which `width` sees to, and head sizes of 16 or more;
- static shapes: with a symbolic batch the kernel for long queries is taken, which reads a session's KV on one
  multiprocessor alone. So each batch bucket is compiled by itself;
- no list of blocks that are visible as a whole: with one it splits the work by the length of the *pool*;
- KV blocks of 16 rows or more. Its tiles have 64 rows, so a block of 64 is read in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from slipstream.engine.kvcache.store import AttentionLayer

BLOCK_SIZE = 64
"""KV rows of a block on a GPU: the kernel's own tile."""
QUERY_BLOCK = 128
"""Query rows of a block of the mask; the kernel pads its queries to a divisor of this."""
_MOST_ROWS = QUERY_BLOCK - 1
_WIDEST = 16
_LEAST_DIM = 16
_MOST_SHAPES = 256


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer asks of the kernel."""

    query: Tensor
    """[chunks, Hkv, rows, Dk]"""
    key: Tensor
    """[1, Hkv, pool rows, Dk], like the values a view of the pool."""
    value: Tensor
    mask: BlockMask
    scale: float
    softcap: float | None
    """Logits are squashed to softcap * tanh(logit / softcap) (Gemma 2)."""
    log_sums: bool
    """Whether the logarithm of each row's sum of weights is wanted, for attention sinks."""


class Kernel(Protocol):
    def __call__(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """[chunks, Hkv, rows, Dv], and the natural log-sum-exp [chunks, Hkv, rows] in fp32 if it is wanted. A row that
        sees nothing gets numbers that mean nothing."""
        ...


class FlexKernel:
    """`compiled=False` runs the operator's own definition, which materialises all scores: for tests of numbers."""

    def __init__(self, compiled: bool = True) -> None:
        self._attend: Callable[..., Any] = flex_attention
        if compiled:
            self._attend = torch.compile(  # type: ignore[call-overload]
                flex_attention, dynamic=False, fullgraph=True, recompile_limit=_MOST_SHAPES, isolate_recompiles=True
            )

    def __call__(self, call: Call) -> tuple[Tensor, Tensor | None]:
        found = self._attend(
            call.query,
            call.key,
            call.value,
            score_mod=_squashed(call.softcap),
            block_mask=call.mask,
            scale=call.scale,
            return_aux=AuxRequest(lse=True) if call.log_sums else None,
        )
        return (found[0], found[1].lse) if call.log_sums else (found, None)


def _squashed(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def squash(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return squash


def width(layers: Sequence[AttentionLayer]) -> int:
    """Tokens of a chunk: a power of two, at most 16, whose query heads make fewer than 128 rows for each KV head."""
    group = max(layer.group for layer in layers)
    return max(1, min(_WIDEST, 1 << (max(1, _MOST_ROWS // group).bit_length() - 1)))


def unfit(layers: Sequence[AttentionLayer]) -> str | None:
    """Why these layers cannot go through the kernel; None if they can."""
    if len({layer.device for layer in layers}) > 1:
        return "its layers are on several devices"
    if any(min(layer.key_dim, layer.value_dim) < _LEAST_DIM for layer in layers):
        return f"it has heads of fewer than {_LEAST_DIM} features"
    if any(layer.group > _MOST_ROWS for layer in layers):
        return f"more than {_MOST_ROWS} query heads share one KV head"
    return None
