"""The KV store: the tensors behind the block pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.engine.devices import upload
from slipstream.engine.kernels.attention import PagedAttention, PagedLayer, paged_attention


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    index: int
    """The module's `layer_idx`."""
    source: int
    """The layer whose rows it reads: itself, but for models that share KV between layers (Gemma 3n and 4)."""
    heads: int
    """Key and value heads, on this shard."""
    key_dim: int
    value_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    group: int = 1
    """Query heads that share a KV head."""


_Shape = tuple[int, int, torch.dtype, torch.device]


class KVStore:
    """Keys and values of all layers; a pool row is one token. Layers of one shape share a tensor
    [2 x layers x heads, rows, dim]: moving rows is one operation for the whole model, and what attention reads for a
    head lies side by side.
    """

    def __init__(self, layers: list[AttentionLayer], rows: int) -> None:
        members: dict[_Shape, list[tuple[int, str]]] = {}
        for layer in layers:
            if layer.source == layer.index:
                members.setdefault(_shape(layer, layer.key_dim), []).append((layer.index, "key"))
                members.setdefault(_shape(layer, layer.value_dim), []).append((layer.index, "value"))
        self._groups: list[torch.Tensor] = []
        views: dict[tuple[int, str], torch.Tensor] = {}
        for (heads, dim, dtype, device), names in members.items():
            # On a CPU empty, not zeros: the system hands out a page when a row in it is first written.
            group = torch.empty(len(names) * heads, rows, dim, dtype=dtype, device=device)
            self._groups.append(group)
            views |= {name: group[place * heads : (place + 1) * heads] for place, name in enumerate(names)}
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._reads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in layers:
            key, value = views[layer.source, "key"], views[layer.source, "value"]
            self._rows[layer.index] = (key, value) if layer.source == layer.index else None
            self._reads[layer.index] = key.unsqueeze(0), value.unsqueeze(0)
        self._kernels: dict[PagedLayer, PagedAttention | None] = {}
        self._all_kernels: dict[tuple[PagedLayer, ...], tuple[PagedAttention, ...] | None] = {}
        self._moves: dict[int, int] = {}
        """The source row of each row to be written."""
        self._writes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Copies that were read but not yet written, so that an error amid them can be mended: group, rows, values."""

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [1, heads, T, dim] to the pool rows [T]. A layer that shares another's rows writes nothing."""
        own = self._rows[layer]
        if own is not None:
            own[0].index_copy_(1, rows, key[0])
            own[1].index_copy_(1, rows, value[0])

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of a layer as views [1, heads, rows, dim]."""
        return self._reads[layer]

    def attention(self, layer: PagedLayer, sinks: torch.Tensor | None = None) -> PagedAttention | None:
        """The kernel of a layer's attention, which writes its rows too; None where there is none. A layer's sinks are
        the same in every pass."""
        if layer not in self._kernels:
            (keys,), (values,) = self._reads[layer.number]
            writes = self._rows[layer.number] is not None
            self._kernels[layer] = paged_attention((keys, values), layer, sinks=sinks, writes=writes)
        return self._kernels[layer]

    def attention_of_all(self, layers: tuple[PagedLayer, ...]) -> tuple[PagedAttention, ...] | None:
        """The kernels of these layers, one object for each such question; None unless every layer has one."""
        if layers not in self._all_kernels:
            found = [kernel for kernel in map(self.attention, layers) if kernel is not None]
            self._all_kernels[layers] = tuple(found) if len(found) == len(layers) else None
        return self._all_kernels[layers]

    def queue_moves(self, moves: list[tuple[int, int]]) -> None:
        """Queues row copies (from, to); all of them are read before any is written. They run before the next step, for
        all sessions at once; until then a copy of a copied row reads the original."""
        self._moves |= {target: self._moves.get(source, source) for source, target in moves}

    @property
    def queued_moves(self) -> list[tuple[int, int]]:
        """The queued row copies (from, to)."""
        return [(source, target) for target, source in self._moves.items()]

    def apply_moves(self) -> None:
        """Runs the queued copies. After an error the next call runs what is left."""
        self._write_moves()
        if not self._moves:
            return
        pairs = torch.tensor(self.queued_moves)
        devices = {group.device: upload(pairs, group.device) for group in self._groups}
        there = [devices[group.device] for group in self._groups]
        rows = [group.index_select(1, here[:, 0]) for group, here in zip(self._groups, there, strict=True)]
        self._writes = [
            (group, here[:, 1], moved) for group, here, moved in zip(self._groups, there, rows, strict=True)
        ]
        self._moves = {}
        self._write_moves()

    def _write_moves(self) -> None:
        while self._writes:
            group, rows, moved = self._writes[-1]
            group.index_copy_(1, rows, moved)
            self._writes.pop()


def _shape(layer: AttentionLayer, dim: int) -> _Shape:
    return (layer.heads, dim, layer.dtype, layer.device)
