"""The engine that runs a model: one packed forward pass over all sessions of a step."""

from __future__ import annotations

import torch

from slipstream.engine.attention.paged_sequences import PagedSequences
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.models.checkpoint import Checkpoint
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument


class TorchEngine:
    """A checkpoint with KV for `tokens` tokens. Use it on one thread only."""

    batch_invariant = True

    def __init__(self, checkpoint: Checkpoint, tokens: int, block_size: int = 32) -> None:
        """Raises ResourceExhausted when not even one block fits."""
        length = checkpoint.info.max_length
        self.model = checkpoint.info
        self._sequences = PagedSequences(checkpoint.layers, length, checkpoint.device, tokens, block_size)
        self.kv = self._sequences.kv
        self._checkpoint = checkpoint
        checkpoint.forward.reserve(min(length, self._sequences.rows))

    @torch.inference_mode()
    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        self.kv.check_step(segments)
        self._check_tokens(segments)
        if self.batch_invariant and any(segment.held for segment in segments):
            raise InvalidArgument("a batch-invariant engine computes all rows of a tree in one pass")
        layers = len(self._checkpoint.layers)
        if hidden is not None and not all(0 <= layer < layers for layer in hidden.layers):
            raise InvalidArgument(f"hidden states of layers {hidden.layers} of a model with {layers} layers")
        plan = self._sequences.plan(segments, batch_invariant=self.batch_invariant)
        output = self._checkpoint.forward(plan, hidden)
        self._sequences.computed(segments)
        return ModelOutput(output.logits.float(), output.hidden)

    def _check_tokens(self, segments: list[Segment]) -> None:
        size = self.model.vocabulary_size
        for segment in segments:
            if not all(0 <= token < size for token in (*segment.pending, *segment.nodes)):
                raise InvalidArgument(f"a token id is outside the vocabulary of {size}")
