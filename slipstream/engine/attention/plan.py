"""The plan of one step: everything the layers share, computed once per forward pass, masks of candidate trees
included."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine.attention.packed import Attending, States, explicit_attention
from slipstream.engine.devices import upload
from slipstream.engine.kvcache.store import KVStore
from slipstream.engine.segment import Segment

HIDDEN = float("-inf")


def inside_mask(segment: Segment) -> torch.Tensor:
    """[n, n] fp32: a row sees itself and its ancestors; 0 visible, -inf hidden."""
    pending, n = len(segment.pending), segment.tokens
    if segment.parents == list(range(-1, len(segment.nodes) - 1)):
        return torch.full((n, n), HIDDEN).triu_(1)
    seen = np.tril(np.ones((n, n), dtype=bool))
    for node, parent in enumerate(segment.parents, start=pending):
        seen[node, :node] = seen[pending + parent, :node]
    return torch.zeros(n, n).masked_fill_(torch.from_numpy(~seen), HIDDEN)


def segment_mask(
    inside: torch.Tensor, positions: torch.Tensor, start: int, base: int, window: int | None
) -> torch.Tensor:
    """[n, L] over the slots start .. base+n-1. Slots before base hold the token of their own position.

    positions int64 [n] are absolute; a window hides keys `window` or more positions back. It is tested on positions,
    not on slots: nodes of a tree sit in slots beyond their depth.
    """
    n = len(positions)
    mask = torch.zeros(n, base - start + n)
    mask[:, base - start :] = inside
    if window is not None:
        keys = torch.cat([torch.arange(start, base), positions])
        mask.masked_fill_(positions.unsqueeze(1) - keys >= window, HIDDEN)
    return mask


class Read(NamedTuple):
    """The pool rows that one segment reads in the layers of one kind, and their mask."""

    start: int
    length: int
    rows: torch.Tensor | None
    """int64 [length] when the rows are not the run start .. start+length-1."""
    mask: torch.Tensor | None
    """[n * group, length] additive in the query's dtype; None when everything is visible to all queries."""


class _Kind(NamedTuple):
    """Layers of one kind read the same."""

    window: int | None
    group: int
    """Query heads of one KV head."""
    dtype: torch.dtype
    device: torch.device


class AttentionPlan:
    def __init__(self, segments: list[Segment], store: KVStore, device: torch.device, max_length: int) -> None:
        self._segments = segments
        self._store = store
        self._counts = [segment.tokens for segment in segments]
        self._depths = [segment.depths() for segment in segments]
        self._rows: dict[torch.device, torch.Tensor] = {}
        self._reads: dict[_Kind, list[Read]] = {}
        self._inside: dict[int, torch.Tensor] = {}
        rows: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for segment, below in zip(segments, self._depths, strict=True):
            base = segment.sequence.length
            rows += segment.sequence.pool_rows(base, base + segment.tokens)
            # A node beyond the end is never committed, but rotary and learnt tables end there.
            positions += [min(base + depth, max_length - 1) for depth in below]
            tokens += segment.pending
            if segment.want_logits:
                wanted += range(len(tokens) - 1, len(tokens) + len(segment.nodes))
            tokens += segment.nodes
        # One transfer for all four: [tokens | positions | rows | wanted].
        count = len(tokens)
        packed = upload(torch.tensor(tokens + positions + rows + wanted), device)
        self.tokens = packed[:count].unsqueeze(0)
        self.positions = packed[count : 2 * count].unsqueeze(0)
        self.rows = packed[2 * count : 3 * count]
        self.wanted = packed[3 * count :]

    def attend(self, module: Attending, states: States, extras: dict[str, object]) -> torch.Tensor:
        """Writes the new rows, then lets each segment's queries see theirs. Returns [1, T, H, Dv]."""
        query, key, value = states
        layer: int = module.layer_idx
        self._store.write(layer, self._rows_on(query.device), key, value)
        keys, values = self._store.read(layer)
        heads, total, group = keys.shape[1], query.shape[2], query.shape[1] // keys.shape[1]
        # Query heads of one KV head become further query rows, token-major: [1, Hkv, T * group, D].
        folded = query.view(heads, group, total, -1).transpose(1, 2).reshape(1, heads, total * group, -1)
        reads = self._reads_for(_Kind(extras.get("sliding_window"), group, query.dtype, query.device))  # type: ignore[arg-type]
        many = len(self._counts) > 1
        parts = torch.split(folded, [count * group for count in self._counts], dim=2) if many else (folded,)
        scale: float = extras.get("scaling") or query.shape[3] ** -0.5  # type: ignore[assignment]
        if extras.get("softcap") is None and extras.get("s_aux") is None:
            found = [
                scaled_dot_product_attention(part, *visible(keys, values, read), attn_mask=read.mask, scale=scale)
                for part, read in zip(parts, reads, strict=True)
            ]
        else:
            found = [
                self._explicit(part, visible(keys, values, read), read, scale, extras)
                for part, read in zip(parts, reads, strict=True)
            ]
        out = torch.cat(found, dim=2) if many else found[0]
        return out.view(heads, total, group, -1).transpose(0, 1).reshape(1, total, heads * group, -1)

    def _explicit(
        self,
        part: torch.Tensor,
        visible: tuple[torch.Tensor, torch.Tensor],
        read: Read,
        scale: float,
        extras: dict[str, object],
    ) -> torch.Tensor:
        sinks = extras.get("s_aux")
        if isinstance(sinks, torch.Tensor):
            heads = part.shape[1]
            group = sinks.numel() // heads
            sinks = sinks.view(1, heads, 1, group).expand(-1, -1, part.shape[2] // group, -1).reshape(1, heads, -1, 1)
        return explicit_attention((part, *visible), read.mask, scale, extras.get("softcap"), sinks)  # type: ignore[arg-type]

    def _rows_on(self, device: torch.device) -> torch.Tensor:
        """The rows that are written; layers may lie on several devices."""
        if device not in self._rows:
            self._rows[device] = self.rows.to(device)
        return self._rows[device]

    def _reads_for(self, kind: _Kind) -> list[Read]:
        found = self._reads.get(kind)
        if found is None:
            found = self._reads[kind] = [self._read(at, kind) for at in range(len(self._segments))]
        return found

    def _read(self, at: int, kind: _Kind) -> Read:
        sequence = self._segments[at].sequence
        base, n = sequence.length, self._counts[at]
        start, window = 0, kind.window
        if window is not None and base + max(self._depths[at]) < window:
            window = None
        if window is not None:
            start = max(0, base + 1 - window)
        mask = None
        if n > 1:
            inside = self._inside.get(at)
            if inside is None:
                inside = self._inside[at] = inside_mask(self._segments[at])
            positions = torch.tensor(self._depths[at]) + base
            mask = segment_mask(inside, positions, start, base, window)
            mask = upload(mask.repeat_interleave(kind.group, dim=0).to(kind.dtype), kind.device)
        length = base + n - start
        if sequence.rows is None:
            return Read(sequence.first_row + start, length, None, mask)
        return Read(0, length, upload(sequence.rows[start : start + length], kind.device), mask)


def visible(keys: torch.Tensor, values: torch.Tensor, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, heads, length, dim] each: views of a contiguous run, else gathered copies."""
    if read.rows is None:
        return keys.narrow(2, read.start, read.length), values.narrow(2, read.start, read.length)
    return keys.index_select(2, read.rows), values.index_select(2, read.rows)
