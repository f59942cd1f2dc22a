"""Attention of many small segments in one call, for devices where a call takes longer than what it computes.

Segments that read contexts of similar length share a call: the keys of each are gathered, padded to the longest, and
what is padded is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine.attention.reads import HIDDEN
from slipstream.engine.devices import upload

MOST_TOKENS = 64
"""Most queries of a segment that shares a call: a prompt has enough for a call of its own."""
SHORT = 256
"""Keys below which it does not matter how many are padded."""
ALIGNED = 16
"""Keys of a call are a multiple of this, as fused kernels want their masks."""


def calls_are_dear(device: torch.device) -> bool:
    """True where a small segment's attention takes longer to begin than to compute."""
    return device.type != "cpu"


class Part(NamedTuple):
    """One segment of a pass."""

    first: int
    """Its first query among the tokens of the pass."""
    depths: list[int]
    """Positions of its tokens, counted from `before`."""
    held: int
    """Leading tokens that ask nothing: they were computed before."""
    keys: torch.Tensor
    """int64 [length]: pool rows that it reads, its own tokens' last."""
    start: int
    """Position of the first key."""
    inside: torch.Tensor
    """[tokens, tokens] 0 or -inf: which of its own tokens a token sees."""

    @property
    def queries(self) -> int:
        return len(self.depths) - self.held

    @property
    def before(self) -> int:
        """Keys in front of its own tokens."""
        return len(self.keys) - len(self.depths)


class SegmentBatch(NamedTuple):
    """Segments that share a call."""

    size: int
    queries: torch.Tensor
    """int64 [size * rows]: query rows of the pass, those of each segment padded with row 0."""
    keys: torch.Tensor
    """int64 [size * length]: pool rows, those of each segment padded with its first: others may hold no numbers."""
    mask: torch.Tensor
    """[size, 1, rows, length] 0 or -inf in the queries' dtype."""

    def attend(self, query: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """query [heads, rows of the pass, Dk]; pool: keys and values [heads, pool rows, D]. Returns
        [heads, size * rows, Dv]."""
        heads = query.shape[0]
        rows = query.index_select(1, self.queries).view(heads, self.size, -1, query.shape[2]).transpose(0, 1)
        keys, values = (
            each.index_select(1, self.keys).view(heads, self.size, -1, each.shape[2]).transpose(0, 1) for each in pool
        )
        found = scaled_dot_product_attention(rows, keys, values, attn_mask=self.mask, scale=scale)
        return found.transpose(0, 1).reshape(heads, -1, values.shape[3])


def alike(parts: Sequence[Part]) -> list[list[int]]:
    """Numbers of the parts, those together that share a call: the longest reads less than twice the keys of the
    shortest, or than SHORT. Parts of many tokens are alone."""
    groups: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        few = part.queries <= MOST_TOKENS
        groups.setdefault(max(len(part.keys), SHORT - 1).bit_length() if few else -1 - number, []).append(number)
    return list(groups.values())


def batch(
    parts: Sequence[Part], group: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> SegmentBatch:
    """`group`: query heads of one KV head, which are neighbouring query rows; `window`: positions that a query sees."""
    count, own = max(part.queries for part in parts), max(len(part.depths) for part in parts)
    length = -(-max(len(part.keys) for part in parts) // ALIGNED) * ALIGNED
    keys = torch.stack([part.keys[0] for part in parts]).unsqueeze(1).repeat(1, length)
    queries = torch.zeros(len(parts), count * group, dtype=torch.int64)
    # One column more than there are own tokens, which no row reads: keys behind them look there.
    inside = torch.zeros(len(parts), count, own + 1, dtype=torch.bool)
    depths = torch.zeros(len(parts), own + 1, dtype=torch.int64)
    for at, part in enumerate(parts):
        rows = torch.arange(part.first * group, (part.first + part.queries) * group)
        queries[at, : len(rows)] = rows
        keys[at, : len(part.keys)] = part.keys
        inside[at, : part.queries, : len(part.depths)] = part.inside[part.held :] == 0
        depths[at, : len(part.depths)] = torch.tensor(part.depths)
    befores = torch.tensor([[part.before, part.start, part.held] for part in parts])
    there = [upload(each, device) for each in (inside, depths, befores)]
    seen = _visible(there[0], there[1], there[2], length, window)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, HIDDEN)
    mask = mask.repeat_interleave(group, dim=1).unsqueeze(1)
    return SegmentBatch(len(parts), upload(queries.view(-1), device), upload(keys.view(-1), device), mask)


def _visible(
    inside: torch.Tensor, depths: torch.Tensor, befores: torch.Tensor, length: int, window: int | None
) -> torch.Tensor:
    """bool [segments, queries, length]: the keys that queries see."""
    count = inside.shape[1]
    before, start, held = (befores[:, column : column + 1] for column in range(3))
    at = torch.arange(length, device=inside.device)
    token = (at - before).clamp(0, inside.shape[2] - 1)  # [segments, length], of keys of own tokens
    is_own = at >= before
    seen = inside.gather(2, token.unsqueeze(1).expand(-1, count, -1)) | ~is_own.unsqueeze(1)
    if window is None:
        return seen
    base = start + before
    key_positions = torch.where(is_own, base + depths.gather(1, token), start + at)
    asking = (held + torch.arange(count, device=inside.device)).clamp(max=depths.shape[1] - 1)
    positions = base + depths.gather(1, asking)
    return seen & (positions.unsqueeze(2) - key_positions.unsqueeze(1) < window)


def order_of(parts: Sequence[Part], groups: Sequence[Sequence[int]], group: int) -> torch.Tensor | None:
    """int64 [rows of the pass]: where each query row stands in the groups' results, one behind the other; None where
    they are in order already. A group of several is padded to its longest part."""
    where: dict[int, int] = {}
    behind = 0
    for numbers in groups:
        width = max(parts[number].queries for number in numbers)
        for number in numbers:
            where[number] = behind
            behind += width * group
    rows = [where[number] + row for number, part in enumerate(parts) for row in range(part.queries * group)]
    return None if rows == list(range(behind)) else torch.tensor(rows)
