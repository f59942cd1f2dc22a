"""All layers of a Llama-like decoder in one call, by decoder.h: between its products a small model takes longer than in
them."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.attention import PagedAttention, PagedStep
from slipstream.engine.kernels.compiled import KINDS
from slipstream.engine.kernels.norms import RmsNorm
from slipstream.engine.kernels.products import PackedProduct

STAGE_BYTES = 16 * 64
"""The `struct stage`s of a layer."""


@dataclass(frozen=True)
class LayerParts:
    """A layer's products and norms."""

    qkv: PackedProduct
    out: PackedProduct
    gate_up: PackedProduct
    down: PackedProduct
    attention_norm: RmsNorm
    feed_norm: RmsNorm
    head_norms: tuple[RmsNorm, RmsNorm] | None
    """Norms of queries and of keys."""


class _Block(ctypes.Structure):
    """`struct block`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "feed_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down", "attention", "kept")),
        *((f"{name}_epsilon", ctypes.c_float) for name in ("attention", "feed", "query", "key")),
    )


class _Pass(ctypes.Structure):
    """`struct pass`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("blocks", "parts", "written", "cosine", "sine", "x")),
        *((name, ctypes.c_void_p) for name in ("normed", "states", "found", "gates", "fed", "wide", "stages")),
        *((name, ctypes.c_long) for name in ("layers", "part_count", "tokens", "hidden", "feed", "kind")),
        ("few", ctypes.c_long),
        ("threads", ctypes.c_long),
        ("run", ctypes.c_void_p),
    )


class PackedLayers:
    """The layers of a decoder, all of one shape."""

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        self._layers = tuple(layers)
        first = layers[0]
        self._hidden, self._feed = first.down.features, first.gate_up.features // 2
        self._widths = (self._hidden, first.qkv.features, first.out.depth, 2 * self._feed, self._feed)
        """Widths of a pass's buffers: normed, states, found, gates, fed."""
        self._widest = max(self._hidden, first.out.depth, self._feed)
        self._attention: tuple[PagedAttention, ...] = ()
        self._blocks = (_Block * len(layers))()

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: PagedStep, kept: Collection[int]
    ) -> dict[int, torch.Tensor]:
        """x [T, hidden] becomes what the last layer adds up to; rotation: cosine and sine [T, dim]. Returns the hidden
        states [T, hidden] that enter the layers `kept`."""
        if step.layers is not self._attention:
            self._attach(step.layers)
        tokens, (cosine, sine), parts = len(x), rotation, step.parts.parts(step.layers[0].group)
        hidden = {layer: torch.empty_like(x) for layer in kept}
        for layer, states in hidden.items():
            self._blocks[layer].kept = states.data_ptr()
        room = x.new_empty(tokens * sum(self._widths))
        places = [room.data_ptr()]
        for width in self._widths[:-1]:
            places.append(places[-1] + tokens * width * x.element_size())
        wide = torch.empty(tokens * self._widest if x.dtype is torch.bfloat16 else 0)
        stages = torch.zeros(len(self._layers) * STAGE_BYTES, dtype=torch.uint8)
        kernels = step.layers[0].kernels
        given = (parts.ctypes.data, step.parts.rows.data_ptr(), cosine.data_ptr(), sine.data_ptr(), x.data_ptr())
        sizes = (len(self._layers), len(parts), tokens, self._hidden, self._feed, KINDS[x.dtype])
        threads = torch.get_num_threads()
        run = _Pass(
            ctypes.addressof(self._blocks),
            *given,
            *places,
            wide.data_ptr(),
            stages.data_ptr(),
            *sizes,
            compiled.FEW,
            threads,
            kernels.threads,
        )
        kernels.decode(ctypes.byref(run))
        for layer in hidden:
            self._blocks[layer].kept = None
        return hidden

    def detach(self) -> None:
        """Lets go of the KV of the last pass; the next one brings its own."""
        self._attention = ()

    def _attach(self, attention: tuple[PagedAttention, ...]) -> None:
        self._attention = attention
        for block, parts, paged in zip(self._blocks, self._layers, attention, strict=True):
            norms = (parts.attention_norm, parts.feed_norm, *(parts.head_norms or ()))
            addresses = [norm.address for norm in norms] + [None] * (4 - len(norms))
            epsilons = [norm.epsilon for norm in norms] + [0.0] * (4 - len(norms))
            products = (parts.qkv, parts.out, parts.gate_up, parts.down)
            block.__init__(*addresses, *(each.address for each in products), paged.address, None, *epsilons)
