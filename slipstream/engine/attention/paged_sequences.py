"""Sequences with real rows of KV, and the plans of steps on them."""

from __future__ import annotations

import torch

from slipstream.engine.attention.plan import AttentionPlan
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.kvcache.store import AttentionLayer, KVStore
from slipstream.engine.segment import Segment


class PagedSequences:
    """KV of `layers` for `tokens` tokens."""

    def __init__(
        self, layers: list[AttentionLayer], max_length: int, device: torch.device, tokens: int, block_size: int
    ) -> None:
        """`device` is that of the model's input tokens. Raises ResourceExhausted when not even one block fits."""
        pool = BlockPool.holding(tokens, block_size)
        self.rows = pool.total * block_size
        self._device = device
        self._store = KVStore(layers, self.rows)
        self.kv = KVCache(pool, max_length, self._store.queue_moves)

    def plan(self, segments: list[Segment], *, batch_invariant: bool) -> AttentionPlan:
        """The next step's plan; `computed` follows its forward pass."""
        self._store.apply_moves()
        return AttentionPlan(segments, self._store, self._device, self.kv.max_length, batch_invariant=batch_invariant)

    def computed(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.sequence.ahead = segment.tokens
