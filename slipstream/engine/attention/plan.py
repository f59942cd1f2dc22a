"""The plan of one step: everything the layers share, computed once per forward pass."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from slipstream.engine.attention.batch_invariant import BLOCK, LEAST_KEYS, ROWS, Rows, attend, least_rows, segment_rows
from slipstream.engine.attention.batched import Part, SegmentBatch, alike, batch, calls_are_dear, order_of
from slipstream.engine.attention.packed import Attending, States, explicit_attention
from slipstream.engine.attention.reads import HIDDEN, Read, inside_mask, segment_mask, visible
from slipstream.engine.devices import upload
from slipstream.engine.kernels.attention import PagedLayer, PagedStep, StepParts
from slipstream.engine.kvcache.store import KVStore
from slipstream.engine.segment import Segment


class _Kind(NamedTuple):
    """Layers of one kind read the same."""

    window: int | None
    heads: int
    group: int
    """Query heads of one KV head."""
    dtype: torch.dtype
    device: torch.device
    least: int
    """Fewest query rows of a product where rows are the same in every pass; 0 where they need not be."""


class _SegmentRows(NamedTuple):
    """A segment's query rows, and some of its neighbours' if it has too few for a product."""

    read: Read
    first: int
    width: int
    """Query rows first .. first+width-1."""
    rows: Rows


class _PassRows(NamedTuple):
    """Query rows of a pass, part by part."""

    parts: list[_SegmentRows]
    kept: torch.Tensor | None
    """int64 [rows]: the parts' rows without those of neighbours; None: all."""


class AttentionPlan:
    def __init__(
        self,
        segments: list[Segment],
        store: KVStore,
        device: torch.device,
        max_length: int,
        *,
        batch_invariant: bool = True,
    ) -> None:
        """`batch_invariant`: on a CPU in fp32 a row has the same bits in every pass. A draft model does without, which
        is faster: what it proposes changes no text."""
        self._batch_invariant = batch_invariant
        self._segments = segments
        self._store = store
        self._counts = [segment.computed for segment in segments]
        self._starts = [0, *accumulate(self._counts)]
        self._depths = [segment.depths() for segment in segments]
        self._rows: dict[torch.device, torch.Tensor] = {}
        self._reads: dict[_Kind, list[Read]] = {}
        self._parts: dict[_Kind, _PassRows] = {}
        self._batches: dict[_Kind, tuple[list[SegmentBatch], torch.Tensor | None]] = {}
        self._inside: dict[int, torch.Tensor] = {}
        rows: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for segment, below in zip(segments, self._depths, strict=True):
            base, held, first = segment.sequence.length, segment.held, len(tokens)
            rows += segment.sequence.pool_rows(base + held, base + segment.tokens)
            # A node beyond the end is never committed, but rotary and learnt tables end there.
            positions += [min(base + depth, max_length - 1) for depth in below[held:]]
            tokens += (segment.pending + segment.nodes)[held:]
            wanted += [first + token for token in segment.logit_tokens()]
        # One transfer for all four: [tokens | positions | rows | wanted].
        count = len(tokens)
        packed = upload(torch.tensor(tokens + positions + rows + wanted), device)
        self.tokens = packed[:count].unsqueeze(0)
        self.positions = packed[count : 2 * count].unsqueeze(0)
        self.rows = packed[2 * count : 3 * count]
        self.wanted = packed[3 * count :]
        self._step = StepParts(segments, self.rows)

    def attend(self, module: Attending, states: States, extras: dict[str, object]) -> torch.Tensor:
        """Writes the new rows, then lets each segment's queries see theirs. Returns [1, T, H, Dv]."""
        query, key, value = states
        layer: int = module.layer_idx
        window: int | None = extras.get("sliding_window")  # type: ignore[assignment]
        scale: float = extras.get("scaling") or query.shape[3] ** -0.5  # type: ignore[assignment]
        softcap: float | None = extras.get("softcap")  # type: ignore[assignment]
        sinks: torch.Tensor | None = extras.get("s_aux")  # type: ignore[assignment]
        if self._step.fits:
            kernel = self._store.attention(PagedLayer(layer, query.shape[1], window, scale, softcap), sinks)
            if kernel is not None:
                return kernel(states, self._step)
        self._store.write(layer, self._rows_on(query.device), key, value)
        keys, values = self._store.read(layer)
        heads, total, group = keys.shape[1], query.shape[2], query.shape[1] // keys.shape[1]
        # Query heads of one KV head become further query rows, token-major: [1, Hkv, T * group, D].
        folded = query.view(heads, group, total, -1).transpose(1, 2).reshape(1, heads, total * group, -1)
        of_rows = _row_sinks(sinks, heads, total)
        exact = self._batch_invariant and query.device.type == "cpu" and query.dtype is torch.float32
        least = (least_rows(heads, keys.shape[3], values.shape[3]) or ROWS[0]) if exact else 0
        kind = _Kind(window, heads, group, query.dtype, query.device, least)
        if exact:
            found = self._attend_invariant(kind, folded[0] * scale, (keys[0], values[0]), softcap, of_rows)
        else:
            found = self._attend_fused(kind, folded, (keys, values), scale, softcap, of_rows)
        return found.view(heads, total, group, -1).transpose(0, 1).reshape(1, total, heads * group, -1)

    def paged(self, layers: tuple[PagedLayer, ...]) -> PagedStep | None:
        kernels = self._store.attention_of_all(layers) if self._step.fits else None
        return None if kernels is None else PagedStep(kernels, self._step)

    def _attend_invariant(
        self,
        kind: _Kind,
        query: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [heads, rows, Dk], scaled; pool: keys and values [heads, pool rows, D]. Returns [heads, rows, Dv]."""
        keys, values = pool
        transposed = keys.transpose(1, 2)
        missing = kind.least - query.shape[1]
        if missing > 0:
            query = pad(query, (0, 0, 0, missing))
            sinks = None if sinks is None else pad(sinks, (0, 0, 0, missing))
        parts, kept = self._parts_for(kind)
        found = []
        for read, first, width, rows in parts:
            if read.rows is None:
                key, value = transposed.narrow(2, read.start, read.length), values.narrow(1, read.start, read.length)
            else:
                key, value = keys.index_select(1, read.rows).transpose(1, 2), values.index_select(1, read.rows)
            own = query.narrow(1, first, width)
            sink = None if sinks is None else sinks.narrow(1, first, width)
            found.append(attend(own, key, value, rows, softcap, sink))
        out = torch.cat(found, dim=1) if len(found) > 1 else found[0]
        return out if kept is None else out.index_select(1, kept)

    def _attend_fused(
        self,
        kind: _Kind,
        folded: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if len(self._segments) > 1 and calls_are_dear(folded.device) and softcap is None and sinks is None:
            return self._attend_batched(kind, folded, pool, scale)
        found = []
        for part, read in zip(
            folded.split([n * kind.group for n in self._counts], 2), self._reads_for(kind), strict=True
        ):
            key, value = visible(*pool, read)
            if softcap is None and sinks is None:
                found.append(scaled_dot_product_attention(part, key, value, attn_mask=read.mask, scale=scale))
                continue
            own = None if sinks is None else sinks[:, : part.shape[2]].unsqueeze(0)  # alike for all tokens
            found.append(explicit_attention((part, key, value), read.mask, scale, softcap, own))
        return torch.cat(found, dim=2) if len(found) > 1 else found[0]

    def _attend_batched(
        self, kind: _Kind, folded: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> torch.Tensor:
        batches, order = self._batches_for(kind)
        keys, values = pool
        found = [each.attend(folded[0], (keys[0], values[0]), scale) for each in batches]
        out = torch.cat(found, dim=1) if len(found) > 1 else found[0]
        return (out if order is None else out.index_select(1, order)).unsqueeze(0)

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

    def _batches_for(self, kind: _Kind) -> tuple[list[SegmentBatch], torch.Tensor | None]:
        """The segments in as few calls as they take, and the order of the results."""
        found = self._batches.get(kind)
        if found is None:
            parts = [self._part(at, kind.window) for at in range(len(self._segments))]
            groups = alike(parts)
            batches = [
                batch([parts[at] for at in numbers], kind.group, kind.window, kind.dtype, kind.device)
                for numbers in groups
            ]
            order = order_of(parts, groups, kind.group)
            found = self._batches[kind] = batches, None if order is None else upload(order, kind.device)
        return found

    def _part(self, at: int, window: int | None) -> Part:
        segment = self._segments[at]
        sequence = segment.sequence
        start = 0 if window is None else max(0, sequence.length + 1 - window)
        stop = sequence.length + segment.tokens
        if sequence.rows is None:
            keys = torch.arange(sequence.first_row + start, sequence.first_row + stop)
        else:
            keys = sequence.rows[start:stop]
        return Part(self._starts[at], self._depths[at], segment.held, keys, start, self._inside_mask(at))

    def _parts_for(self, kind: _Kind) -> _PassRows:
        found = self._parts.get(kind)
        if found is None:
            found = self._parts[kind] = self._divide(kind)
        return found

    def _divide(self, kind: _Kind) -> _PassRows:
        parts: list[_SegmentRows] = []
        kept: list[int] = []
        total, rows = self._starts[-1] * kind.group, 0
        for at, read in enumerate(self._reads_for(kind)):
            segment, own, count = self._segments[at], self._starts[at] * kind.group, self._counts[at] * kind.group
            width = max(count, kind.least)
            first = max(0, min(own, total - width))
            inside = None if segment.is_chain else self._inside_mask(at)
            seen = segment_rows(segment, read, inside, kind.heads, kind.group).widened(own - first, width)
            parts.append(_SegmentRows(read, first, width, seen))
            kept += range(rows + own - first, rows + own - first + count)
            rows += width
        return _PassRows(parts, torch.tensor(kept) if len(kept) < rows else None)

    def _read(self, at: int, kind: _Kind) -> Read:
        segment = self._segments[at]
        sequence, held = segment.sequence, segment.held
        base, n = sequence.length, segment.tokens
        start, window = 0, kind.window
        if window is not None and base + max(self._depths[at]) < window:
            window = None
        if window is not None:
            start = max(0, base + 1 - window)
            start -= start % BLOCK if kind.least else 0
        length = base + n - start
        missing = max(0, LEAST_KEYS - length) if kind.least else 0
        mask = None
        if n > 1 or missing or (kind.least and window is not None):
            positions = torch.tensor(self._depths[at]) + base
            mask = segment_mask(self._inside_mask(at), positions, start, base, window)[held:]
            mask = pad(mask, (0, missing), value=HIDDEN) if missing else mask
            mask = upload(mask.repeat_interleave(kind.group, dim=0).to(kind.dtype), kind.device)
        if missing:
            # Missing keys are the first one again, hidden: rows that were never written may hold no numbers.
            rows = torch.tensor(sequence.pool_rows(0, length) + sequence.pool_rows(0, 1) * missing)
        elif sequence.rows is not None:
            rows = upload(sequence.rows[start : start + length], kind.device)
        else:
            return Read(sequence.first_row + start, length, None, mask, start)
        return Read(0, length + missing, rows, mask, start)

    def _inside_mask(self, at: int) -> torch.Tensor:
        if at not in self._inside:
            self._inside[at] = inside_mask(self._segments[at])
        return self._inside[at]


def _row_sinks(sinks: torch.Tensor | None, heads: int, total: int) -> torch.Tensor | None:
    """Sinks [query heads] of the query rows [heads, rows, 1], token-major."""
    if sinks is None:
        return None
    return sinks.view(heads, 1, -1).expand(-1, total, -1).reshape(heads, -1, 1)
