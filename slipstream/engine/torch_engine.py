"""The engine that runs a model: one packed forward pass over all sessions of a step."""

from __future__ import annotations

from typing import Protocol

import torch

from slipstream.engine.attention.plan import AttentionPlan
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.forward import Forward
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.manager import KVCacheManager
from slipstream.engine.kvcache.store import AttentionLayer, KVStore
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument


class LoadedModel(Protocol):
    """A checkpoint, or a part of one."""

    @property
    def forward(self) -> Forward: ...

    @property
    def layers(self) -> list[AttentionLayer]: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def device(self) -> torch.device:
        """That of the input tokens."""
        ...


class TorchEngine(KVCacheManager):
    """With KV for `tokens` tokens. Use it on one thread only."""

    def __init__(self, checkpoint: LoadedModel, tokens: int, block_size: int = 32) -> None:
        """Raises ResourceExhausted when not even one block fits."""
        pool = BlockPool.holding(tokens, block_size)
        super().__init__(pool, checkpoint.info.max_length)
        self.model = checkpoint.info
        self._checkpoint = checkpoint
        rows = pool.total * block_size
        checkpoint.forward.reserve(min(checkpoint.info.max_length, rows))
        self._store = KVStore(checkpoint.layers, rows)

    @torch.inference_mode()
    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        self._check_step(segments)
        self._check_tokens(segments)
        if self.batch_invariant and any(segment.held for segment in segments):
            raise InvalidArgument("a batch-invariant engine computes all rows of a tree in one pass")
        layers = len(self._checkpoint.layers)
        if hidden is not None and not all(0 <= layer < layers for layer in hidden.layers):
            raise InvalidArgument(f"hidden states of layers {hidden.layers} of a model with {layers} layers")
        self._store.apply_moves()
        plan = AttentionPlan(
            segments, self._store, self._checkpoint.device, self._max_length, batch_invariant=self.batch_invariant
        )
        output = self._checkpoint.forward(plan, hidden)
        for segment in segments:
            segment.sequence.ahead = segment.tokens
        return ModelOutput(output.logits.float(), output.hidden)

    def _check_tokens(self, segments: list[Segment]) -> None:
        size = self.model.vocabulary_size
        for segment in segments:
            if not all(0 <= token < size for token in (*segment.pending, *segment.nodes)):
                raise InvalidArgument(f"a token id is outside the vocabulary of {size}")

    def _copy_rows(self, moves: list[tuple[int, int]]) -> None:
        self._store.queue_moves(moves)
