"""Attention on a CPU in fp32 in which a row has the same bits in every pass.

What else is in the pass, how the prompt was cut, which branch of the tree a node is on and where the rows lie in the
pool must not change the order in which a row's sums are added up. Three steps:

scores   one product of all rows and keys. Kernels add up a head's features in one order for every element, if there
         are enough rows and keys: `least_rows` asks this machine, LEAST_KEYS is for all.
weights  softmax over keys in the order of their positions, from a multiple of BLOCK on: each key is added in the lane
         of its position, and hidden keys add zeros. Nodes of a tree are brought into the order of their paths.
values   one product for each BLOCK of positions, added up in the order of blocks. Inside a product the kernel adds key
         after key, so that hidden keys, whose weight is zero, change nothing wherever they lie.

"Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab 2025) names the property.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from slipstream.engine.attention.reads import Read
from slipstream.engine.segment import Segment

log = logging.getLogger(__name__)

BLOCK = 128
"""Positions whose values are summed in one product."""
MOST_NODES = 64
"""Candidates of a tree with branches up to which a product of one block and of all candidates is one run of additions:
kernels cut sums of more than 192 keys in two."""
LEAST_KEYS = 16
"""Kernels and softmax add up fewer in another order."""
ROWS = (4, 8, 16)
"""Possible results of `least_rows`; in products of fewer rows kernels add up in another order."""
_SCORES = 1 << 18
"""Scores of one KV head that are computed at a time: long prompts take several products."""


class Product(NamedTuple):
    """The keys start .. start+size-1 with weights times `mask` (fp32 [size]; None: as they are)."""

    start: int
    size: int
    mask: torch.Tensor | None = None


class Order(NamedTuple):
    """Nodes of a tree in the order that each row adds them up: its own path first."""

    first: int
    """The first node's key."""
    to_path: torch.Tensor
    """int64 [heads, rows, nodes]: the node at each place."""
    to_slots: torch.Tensor
    """int64 [heads, rows, nodes]: the place of each node."""


class Rows(NamedTuple):
    """Keys that the query rows of one segment see, and the products over them."""

    mask: torch.Tensor | None
    """[rows, keys], additive; None when every row sees all keys."""
    products: Sequence[Product] = ()
    """Empty: each BLOCK of keys is one."""
    order: Order | None = None
    before: int | None = None
    """Keys before the first row's own, if each row sees one more key than the row before it."""
    group: int = 1
    """Rows of a token."""

    def widened(self, before: int, count: int) -> Rows:
        """`count` rows, of which `before` stand before these; what the others see does not matter."""
        if self.mask is None or count == len(self.mask):
            return self
        more = (0, 0, before, count - before - len(self.mask))
        order = self.order
        if order is not None:
            order = Order(order.first, *(pad(places, more) for places in (order.to_path, order.to_slots)))
        return Rows(pad(self.mask, more), self.products, order)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [heads, rows, Dk], scaled; keys [heads, Dk, keys], values [heads, keys, Dv], sinks [heads, rows, 1].
    Returns [heads, rows, Dv]."""
    count, length = query.shape[1], keys.shape[2]
    if count > _rows_at_a_time(length):
        return _attend_in_steps(query, keys, values, rows, softcap, sinks)
    if softcap is not None:
        scores = torch.tanh(torch.bmm(query, keys) / softcap) * softcap
        scores = scores if rows.mask is None else scores + rows.mask
    elif rows.mask is None:
        scores = torch.bmm(query, keys)
    else:
        scores = torch.baddbmm(rows.mask, query, keys)
    if rows.order is not None:
        _permute(scores, rows.order.first, rows.order.to_path)
    weights = scores.softmax(2) if sinks is None else torch.cat([sinks, scores], 2).softmax(2)[:, :, 1:]
    if rows.order is not None:
        _permute(weights, rows.order.first, rows.order.to_slots)
    return _weigh(weights, values, rows.products)


def _attend_in_steps(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The rows of a long prompt, some at a time."""
    step = _rows_at_a_time(keys.shape[2])
    found = query.new_empty(*query.shape[:2], values.shape[2])
    for stop in range(query.shape[1], 0, -step):
        at = slice(max(0, stop - step), max(stop, ROWS[-1]))
        seen = keys.shape[2]
        if rows.before is not None:
            seen = max(LEAST_KEYS, rows.before - (-at.stop // rows.group))
        key, value = keys.narrow(2, 0, seen), values.narrow(1, 0, seen)
        of_sinks = None if sinks is None else sinks[:, at]
        found[:, at] = attend(query[:, at], key, value, _cut(rows, at, seen), softcap, of_sinks)
    return found


def _rows_at_a_time(keys: int) -> int:
    return max(_SCORES // keys, 4 * ROWS[-1])


def _cut(rows: Rows, at: slice, seen: int) -> Rows:
    order = rows.order
    if order is not None:
        order = Order(order.first, order.to_path[:, at], order.to_slots[:, at])
    return Rows(None if rows.mask is None else rows.mask[at, :seen], rows.products, order)


def _permute(of: torch.Tensor, first: int, places: torch.Tensor) -> None:
    nodes = of.narrow(2, first, places.shape[2])
    nodes.copy_(nodes.gather(2, places))


def _weigh(weights: torch.Tensor, values: torch.Tensor, products: Sequence[Product]) -> torch.Tensor:
    if len(products) == 1:
        return torch.bmm(weights, values)
    if products:
        parts = [weights.narrow(2, start, size) for start, size, _ in products]
        parts = [part if each.mask is None else part * each.mask for part, each in zip(parts, products, strict=True)]
        pairs = zip(parts, (values.narrow(1, start, size) for start, size, _ in products), strict=True)
    elif weights.shape[2] <= BLOCK:
        return torch.bmm(weights, values)
    else:
        pairs = zip(weights.split(BLOCK, 2), values.split(BLOCK, 1), strict=True)
    found = torch.bmm(*next(pairs))
    for part, value in pairs:
        missing = LEAST_KEYS - part.shape[2]
        if missing > 0:
            part, value = pad(part, (0, missing)), pad(value, (0, 0, 0, missing))
        found.baddbmm_(part, value)
    return found


def segment_rows(segment: Segment, read: Read, inside: torch.Tensor | None, heads: int, group: int) -> Rows:
    """Returns the keys that the segment's query rows see; `inside` is its mask [n, n] if it is a tree with branches."""
    before, pending = segment.sequence.length - read.position, len(segment.pending)
    if inside is None:
        return Rows(read.mask, before=before, group=group)
    trunk = before + pending
    depths = [depth - pending for depth in segment.depths()[pending:]]
    both = _path_order(inside[:, pending:], group).expand(-1, heads, -1, -1)
    return Rows(read.mask, _tree_products(trunk, depths, read.length), Order(trunk, both[0], both[1]))


def _tree_products(trunk: int, depths: list[int], length: int) -> list[Product]:
    """Products of `trunk` keys in the order of their positions, and of nodes behind them at `trunk` + depth, up to
    `length`. Nodes of a tree that crosses the end of a block are in two products, each of which masks the others."""
    whole = trunk // BLOCK
    places = [(trunk + depth) // BLOCK for depth in depths]
    products = [Product(block * BLOCK, BLOCK) for block in range(whole)]
    for block in range(whole, max(places) + 1):
        start = min(block * BLOCK, trunk)
        mask = None
        if max(places) > whole:
            inside = [1.0] * (trunk - start) + [float(place == block) for place in places]
            mask = torch.tensor(inside + [0.0] * (length - start - len(inside)))
        products.append(Product(start, length - start, mask))
    return products


def _path_order(inside: torch.Tensor, group: int) -> torch.Tensor:
    """int64 [2, 1, rows, nodes]: the node at each place, and the place of each node; `inside` [tokens, nodes] hides
    what is not above a token."""
    # A path's nodes stand parents before children, so a stable sort leaves them in the order of their positions.
    to_path = (inside.numpy() < 0).argsort(axis=1, kind="stable")
    both = np.stack([to_path, to_path.argsort(axis=1)])
    return torch.from_numpy(both.repeat(group, axis=1)).unsqueeze(1)


@cache
def least_rows(heads: int, key_dim: int, value_dim: int) -> int | None:
    """The fewest rows of a product from which on this machine's kernels compute a row of heads of this shape alike,
    found by trial; None when there is no such number."""
    chance = torch.Generator().manual_seed(1)
    keys = torch.randn(700, heads, key_dim, generator=chance).permute(1, 2, 0)
    values = torch.randn(700, heads, value_dim, generator=chance).transpose(0, 1)
    query = torch.randn(heads, 96, key_dim, generator=chance)
    weights = torch.rand(heads, 96, BLOCK, generator=chance)
    for least in ROWS:
        counts = (*range(least, 2 * least + 2), 24, 27, 50, 64)
        if all(_rows_alike(query, keys, count) and _sums_alike(weights, values, count) for count in counts):
            return least
    log.warning("products on this CPU depend on their shape: at a near-tie a text may depend on speculation")
    return None


def _rows_alike(query: torch.Tensor, keys: torch.Tensor, count: int) -> bool:
    expected = torch.bmm(query, keys)
    for length in (*range(LEAST_KEYS, BLOCK + LEAST_KEYS), 200, 257, 513, 650):
        row = length % 32
        some = torch.bmm(query[:, row : row + count], keys[..., row : row + length])
        if not torch.equal(some, expected[:, row : row + count, row : row + length]):
            return False
    return True


def _sums_alike(weights: torch.Tensor, values: torch.Tensor, count: int) -> bool:
    """Whether sums over keys are equal in rows alone, over fewer keys, and over keys between hidden ones."""
    for length in (*range(LEAST_KEYS, BLOCK, 7), BLOCK):
        few = weights[..., :length]
        before = weights.new_ones(*few.shape[:2], values.shape[2])
        expected = torch.baddbmm(before, few, values[:, :length])
        if not torch.equal(torch.baddbmm(before[:, :count], few[:, :count], values[:, :length]), expected[:, :count]):
            return False
        for cut, gap in ((0, 5), (length // 2, 17), (length, MOST_NODES), (length - 1, MOST_NODES)):
            hidden = few.new_zeros(*few.shape[:2], gap)
            spread = torch.cat([few[..., :cut], hidden, few[..., cut:]], 2)[:, :count]
            apart = torch.cat([values[:, :cut], values[:, 300 : 300 + gap], values[:, cut:length]], 1)
            if not torch.equal(torch.baddbmm(before[:, :count], spread, apart), expected[:, :count]):
                return False
    return True
