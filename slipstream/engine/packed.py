"""The engine that runs a model: one packed forward pass over all sessions of a step."""

from __future__ import annotations

import torch

from slipstream.engine.blocks import BlockPool
from slipstream.engine.bookkeeping import Bookkeeping
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.kv import KVStore
from slipstream.engine.memory import available_bytes
from slipstream.engine.plan import Plan
from slipstream.engine.step import Segment
from slipstream.errors import InvalidArgument, ResourceExhausted


class PackedEngine(Bookkeeping):
    """KV for `tokens` tokens, or for what `memory_fraction` of the free memory holds. Use it on one thread only.

    Raises ResourceExhausted when not even one block fits.
    """

    def __init__(
        self, checkpoint: Checkpoint, tokens: int | None = None, memory_fraction: float = 0.5, block_size: int = 32
    ) -> None:
        if tokens is None:
            token_bytes = sum(layer.row_bytes for layer in checkpoint.layers)
            tokens = int(available_bytes(checkpoint.device) * memory_fraction / token_bytes)
        blocks = tokens // block_size
        if blocks < 1:
            raise ResourceExhausted(f"KV for {tokens} tokens is less than one block of {block_size}; give more memory.")
        super().__init__(BlockPool(blocks, block_size), checkpoint.info.max_length)
        self.model = checkpoint.info
        self._checkpoint = checkpoint
        checkpoint.forward.reserve(min(checkpoint.info.max_length, blocks * block_size))
        self._store = KVStore(checkpoint.layers, blocks * block_size)

    @torch.inference_mode()
    def forward(self, segments: list[Segment]) -> torch.Tensor:
        self._begin(segments)
        self._check_tokens(segments)
        self._store.settle()
        plan = Plan(segments, self._store, self._checkpoint.device, self._max_length)
        logits = self._checkpoint.forward(plan)
        for segment in segments:
            segment.sequence.ahead = segment.tokens
        return logits.float()

    def _check_tokens(self, segments: list[Segment]) -> None:
        size = self.model.vocabulary_size
        for segment in segments:
            if not all(0 <= token < size for token in (*segment.pending, *segment.nodes)):
                raise InvalidArgument(f"a token id is outside the vocabulary of {size}")

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        self._store.move(moves)
