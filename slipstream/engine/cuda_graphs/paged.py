"""The plan of a padded step: attention by one kernel for all sessions, straight from the pool's blocks.

Nothing in it depends on the step but the contents of its `Inputs`, so a graph captured with it serves every step of its
bucket. The kernel is given all rows of the pool, for each chunk the list of blocks to read, and a function that says
for a chunk, a query row and a *physical* pool row whether the one sees the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from slipstream.engine.attention.packed import Attending, States
from slipstream.engine.cuda_graphs.flex import QUERY_BLOCK, Call, Kernel
from slipstream.engine.cuda_graphs.inputs import Bucket, Inputs
from slipstream.engine.kvcache.store import KVStore

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class PagedPlan:
    """Made anew in each warm-up and capture; what it computes first belongs to the graph."""

    def __init__(self, inputs: Inputs, bucket: Bucket, store: KVStore, kernel: Kernel) -> None:
        self._inputs = inputs
        self._store = store
        self._kernel = kernel
        count, chunks = bucket
        self.tokens = inputs.tokens[:count].unsqueeze(0)
        self.positions = inputs.positions[:count].unsqueeze(0)
        self.wanted, self._rows, self._place = inputs.wanted[:count], inputs.rows[:count], inputs.place[:count]
        self._least, self._blocks = inputs.least[:chunks], inputs.blocks[:chunks]
        pool, device = inputs.pool, inputs.tokens.device
        within = torch.arange(inputs.width, device=device)
        self._chosen = (inputs.first[:chunks].long().unsqueeze(1) + within).clamp(max=count - 1).flatten()
        columns = torch.arange(pool.longest, dtype=torch.int32, device=device)
        at = (inputs.offset[:chunks].unsqueeze(1) + columns).clamp(max=len(inputs.table) - 1)
        listed = columns < self._blocks.unsqueeze(1)
        # int32 [chunks, longest]: the blocks of each chunk's sequence in the order of its slots.
        self._table = torch.where(listed, inputs.table[at.long()], pool.trash)
        # int32 [chunks, blocks + 1]: which of its sequence's blocks a physical block is, -1 for those it does not read;
        # for the trash block, which nobody reads, one behind them.
        self._index = torch.full((chunks, pool.blocks + 1), -1, dtype=torch.int32, device=device)
        self._index.scatter_(1, self._table.long(), columns.expand(chunks, -1))
        self._masks: dict[tuple[int | None, int], BlockMask] = {}

    def attend(self, module: Attending, states: States, extras: dict[str, object]) -> Tensor:
        """Writes the new rows, then lets every chunk's queries see theirs. Returns [1, T, H, Dv]."""
        query, key, value = states
        layer: int = module.layer_idx
        self._store.write(layer, self._rows, key, value)
        keys, values = self._store.read(layer)
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        sinks = extras.get("s_aux")
        found, log_sums = self._kernel(
            Call(
                query=self._chunked(query, heads),
                key=keys,
                value=values,
                mask=self._mask(extras.get("sliding_window"), group),  # type: ignore[arg-type]
                scale=extras.get("scaling") or query.shape[3] ** -0.5,  # type: ignore[arg-type]
                softcap=extras.get("softcap"),  # type: ignore[arg-type]
                log_sums=sinks is not None,
            )
        )
        if isinstance(sinks, Tensor) and log_sums is not None:
            found = _with_sinks(found, log_sums, sinks.view(1, heads, 1, group))
        return self._flat(found, heads, group)

    def _chunked(self, query: Tensor, heads: int) -> Tensor:
        """[1, H, T, D] -> [chunks, Hkv, width * group, D]: the query heads of one KV head are further rows."""
        group, dim, width = query.shape[1] // heads, query.shape[3], self._inputs.width
        rows = query[0].transpose(0, 1).index_select(0, self._chosen).view(-1, width, heads, group, dim)
        return rows.transpose(1, 2).reshape(-1, heads, width * group, dim)

    def _flat(self, found: Tensor, heads: int, group: int) -> Tensor:
        """[chunks, Hkv, width * group, Dv] -> [1, T, H, Dv]"""
        width, dim = self._inputs.width, found.shape[3]
        rows = found.view(-1, heads, width, group, dim).transpose(1, 2).reshape(-1, heads * group, dim)
        return rows.index_select(0, self._place).unsqueeze(0)

    def _mask(self, window: int | None, group: int) -> BlockMask:
        """Shared by all layers with the same window and group size."""
        found = self._masks.get((window, group))
        if found is None:
            blocks, table = self._read(window)
            pool = self._inputs.pool
            found = self._masks[window, group] = BlockMask.from_kv_blocks(
                blocks.view(-1, 1, 1),
                table.view(-1, 1, 1, pool.longest),
                BLOCK_SIZE=(QUERY_BLOCK, pool.block_size),
                mask_mod=self._sees(window, group),
                seq_lengths=(self._inputs.width * group, pool.rows),
                compute_q_blocks=False,
            )
        return found

    def _read(self, window: int | None) -> tuple[Tensor, Tensor]:
        """How many blocks each chunk reads, and which [chunks, longest]: not those that all its windows have left.

        The token in slot s has a position of s at most, so what lies before the window of the smallest position may
        be left out by slots.
        """
        if window is None:
            return self._blocks, self._table
        pool = self._inputs.pool
        passed = (self._least + (1 - window)).clamp(min=0) // pool.block_size
        columns = torch.arange(pool.longest, dtype=torch.int32, device=passed.device)
        shifted = (columns + passed.unsqueeze(1)).clamp(max=pool.longest - 1)
        return self._blocks - passed, self._table.gather(1, shifted.long())

    def _sees(self, window: int | None, group: int) -> Sees:
        """Whether query row m of chunk b sees pool row n; broadcasts. What it looks things up in has one size for all
        buckets, so that the kernel is compiled once for each number of chunks."""
        inputs, index = self._inputs, self._index
        first, start, base = inputs.first, inputs.start, inputs.base
        enter, leave, positions = inputs.enter, inputs.leave, inputs.positions
        size, last = inputs.pool.block_size, inputs.most - 1

        def sees(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            block = index[b, n // size]
            slot = block * size + n % size
            behind = slot - base[b]  # from 0 on it is a token of this step
            query = (first[b] + m // group).clamp(max=last)
            token = start[b] + behind
            key = token.clamp(min=0, max=last)
            inside = (token <= last) & (enter[key] <= enter[query]) & (enter[query] < leave[key])
            seen = (block >= 0) & ((behind < 0) | inside)
            if window is None:
                return seen
            # On positions, not on slots: nodes of a tree sit in slots beyond their depth.
            return seen & (positions[query] - torch.where(behind < 0, slot, positions[key]) < window)

        return sees


def _with_sinks(found: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Sinks [1, Hkv, 1, group] take a share of each row's weights: what is left is the sigmoid of (log of the sum of
    the others - sink)."""
    rows = log_sums.view(*log_sums.shape[:2], -1, sinks.shape[3])
    kept = torch.sigmoid(rows - sinks.float()).view(*log_sums.shape, 1)
    return (found * kept).to(found.dtype)
