"""Attention to paged keys and values on a CPU, by the kernel of attention.h: all sessions of a step in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Several
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import KINDS, Kernels, find_kernels
from slipstream.engine.model_info import MOST_CANDIDATES
from slipstream.engine.segment import Segment

MOST_QUERIES, MOST_DIM, MOST_NODES = 96, 512, MOST_CANDIDATES
"""Query rows of a part, numbers of a head, and candidates of a session that the kernel has room for."""
_LONG = ctypes.c_long
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _LayerStruct(ctypes.Structure):
    """`struct layer`."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, _LONG) for name in ("key_row", "key_head", "value_row", "value_head")),
        *((name, _LONG) for name in ("heads", "group", "key_dim", "value_dim", "kind", "level", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


class PagedLayer(NamedTuple):
    """Parameters of a layer's attention, without its pools."""

    number: int
    query_heads: int
    window: int | None
    scale: float
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap), as in Gemma 2."""


class PagedAttention:
    """Attention of one layer to its pools."""

    def __init__(
        self,
        kernels: Kernels,
        pools: tuple[torch.Tensor, torch.Tensor],
        layer: PagedLayer,
        *,
        sinks: torch.Tensor | None = None,
        writes: bool = True,
    ) -> None:
        """pools: keys and values [heads, rows, dim]. sinks [query heads]: scores of keys without values, as gpt-oss has
        them. Layers that read another one's pools do not write (`writes`)."""
        keys, values = pools
        heads, _, self.value_dim = values.shape
        self.group = layer.query_heads // heads
        self.kernels, self._pools, self._writes = kernels, pools, writes
        self._sinks = None if sinks is None else sinks.detach().float().contiguous()
        sizes = (heads, self.group, keys.shape[2], self.value_dim, KINDS[keys.dtype], kernels.level, layer.window or 0)
        strides = [each.element_size() * each.stride(at) for each in (keys, values) for at in (1, 0)]
        of_sinks = None if self._sinks is None else self._sinks.data_ptr()
        of_scores = (layer.scale, layer.softcap or 0.0, of_sinks)
        self._layer = _LayerStruct(keys.data_ptr(), values.data_ptr(), *strides, *sizes, *of_scores)
        self.address = ctypes.addressof(self._layer)
        """Where its `struct layer` stands."""

    def __call__(self, states: States, step: StepParts) -> torch.Tensor:
        """query [1, H, T, Dk]; key, value [1, Hkv, T, D], which are written to the step's rows. Returns
        [1, T, H, Dv]."""
        query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in states)
        heads, tokens = query.shape[1:3]
        out = query.new_empty((1, tokens, heads, self.value_dim))
        item = query.element_size()
        strides = [item * each.stride(at) for each in (query, key, value) for at in (2, 1)]
        parts = step.parts(self.group)
        pointers = (query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr())
        call = (_LONG * 10)(*pointers, *strides)
        self.kernels.attend(
            self.address, call, parts.ctypes.data, len(parts), step.rows.data_ptr() if self._writes else None, tokens,
            compiled.FEW, torch.get_num_threads(), self.kernels.threads,
        )  # fmt: skip
        return out


def paged_attention(
    pools: tuple[torch.Tensor, torch.Tensor],
    layer: PagedLayer,
    *,
    sinks: torch.Tensor | None = None,
    writes: bool = True,
) -> PagedAttention | None:
    """See `PagedAttention`; None where there is no kernel for pools like these."""
    keys, values = pools
    kernels = find_kernels() if keys.device.type == "cpu" and keys.dtype in KINDS else None
    if kernels is None or not fits(layer.query_heads // keys.shape[0], keys.shape[2], values.shape[2]):
        return None
    return PagedAttention(kernels, pools, layer, sinks=sinks, writes=writes)


def fits(group: int, key_dim: int, value_dim: int) -> bool:
    """True if the kernel takes `group` query heads for each KV head, of these dimensions."""
    return group <= MOST_QUERIES and not any(size % 16 or size > MOST_DIM for size in (key_dim, value_dim))


class StepParts:
    """The tokens of a step, as the kernel takes them: `struct part`."""

    def __init__(self, segments: Several[Segment], rows: torch.Tensor) -> None:
        """`rows` int64 [tokens]: the pool row of each."""
        self.rows = rows
        self.fits = all(len(segment.nodes) <= MOST_NODES or segment.is_chain for segment in segments)
        """False if the kernel has no room for so many candidates."""
        self._segments = segments
        self._parts: dict[int, np.ndarray[tuple[int, int], np.dtype[np.int64]]] = {}

    def parts(self, group: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """[parts, 8], of so many query heads for each KV head."""
        found = self._parts.get(group)
        if found is None:
            found = self._parts[group] = np.array(self._divide(MOST_QUERIES // group), dtype=np.int64)
        return found

    @cached_property
    def _slots(self) -> list[torch.Tensor | None]:
        """The pool row of each slot, by segment; None where they follow each other."""
        return [each.sequence.rows for each in self._segments]

    @cached_property
    def _parents(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Those of all segments' candidates, one segment after the other."""
        return np.array([parent for each in self._segments for parent in each.parents], dtype=np.int64)

    def _divide(self, most: int) -> list[tuple[int, ...]]:
        row, parents = 0, self._parents.ctypes.data
        parts: list[tuple[int, ...]] = []
        for segment, slots in zip(self._segments, self._slots, strict=True):
            sequence, tokens = segment.sequence, segment.tokens
            pending = tokens if segment.is_chain else len(segment.pending)
            where = (sequence.first_row, 0) if slots is None else (0, slots.data_ptr())
            for first in range(segment.held, tokens, most):
                count = min(most, tokens - first)
                parts.append((row + first - segment.held, first, count, sequence.length, pending, *where, parents))
            row += segment.computed
            parents += 8 * len(segment.nodes)
        parts.sort(key=lambda part: -part[2] * (part[1] + part[2] + part[3]))  # the longest first: threads end together
        return parts


class PagedStep(NamedTuple):
    """The attention of a step in all layers."""

    layers: tuple[PagedAttention, ...]
    parts: StepParts
