"""The engine that runs a model: one packed forward pass over all sessions of a step."""

from __future__ import annotations

import torch

from slipstream.engine.attention.plan import AttentionPlan
from slipstream.engine.cuda_graphs.graphs import Acceleration, GraphedSteps
from slipstream.engine.cuda_graphs.inputs import Inputs, Pool
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.manager import KVCacheManager
from slipstream.engine.kvcache.store import KVStore
from slipstream.engine.models.checkpoint import Checkpoint
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument


class TorchEngine(KVCacheManager):
    """With KV for `tokens` tokens. Use it on one thread only.

    With an `acceleration`, steps that fit one of its buckets are padded and replayed, others take the ordinary way.
    Raises ResourceExhausted when not even one block fits.
    """

    def __init__(
        self, checkpoint: Checkpoint, tokens: int, block_size: int = 32, acceleration: Acceleration | None = None
    ) -> None:
        pool = BlockPool.holding(tokens, block_size)
        super().__init__(pool, checkpoint.info.max_length)
        self.model = checkpoint.info
        self._checkpoint = checkpoint
        rows = pool.total * block_size
        checkpoint.forward.reserve(min(checkpoint.info.max_length, rows))
        self._steps: GraphedSteps | None = None
        if acceleration is None:
            self._store = KVStore(checkpoint.layers, rows)
        else:
            self._accelerate(acceleration)

    def _accelerate(self, acceleration: Acceleration) -> None:
        buckets, length = acceleration.buckets, self._max_length
        longest = min(self._pool.blocks_for(length + buckets.most_tokens), self.blocks_total + 1)
        pool = Pool(self.blocks_total, self.block_size, longest, length)
        self._store = KVStore(self._checkpoint.layers, pool.rows, masked=True)
        inputs = Inputs(buckets.most_tokens, buckets.width, pool, self._checkpoint.device)
        self._steps = GraphedSteps(acceleration, self._checkpoint.forward, self._store, inputs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Prepares every padded step's size now, not when it is first met."""
        if self._steps is not None:
            self._steps.capture()

    @torch.inference_mode()
    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        self._begin(segments)
        self._check_tokens(segments)
        layers = len(self._checkpoint.layers)
        if hidden is not None and not all(0 <= layer < layers for layer in hidden.layers):
            raise InvalidArgument(f"hidden states of layers {hidden.layers} of a model with {layers} layers")
        output = self._pass(segments, hidden)
        for segment in segments:
            segment.sequence.ahead = segment.tokens
        return output

    def _pass(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        """The part of `forward` that all ranks of a group take. Padded steps keep no hidden states."""
        self._store.settle()
        if self._steps is not None and hidden is None and (logits := self._steps.run(segments)) is not None:
            return ModelOutput(logits)
        plan = AttentionPlan(segments, self._store, self._checkpoint.device, self._max_length)
        output = self._checkpoint.forward(plan, hidden)
        return ModelOutput(output.logits.float(), output.hidden)

    def _check_tokens(self, segments: list[Segment]) -> None:
        size = self.model.vocabulary_size
        for segment in segments:
            if not all(0 <= token < size for token in (*segment.pending, *segment.nodes)):
                raise InvalidArgument(f"a token id is outside the vocabulary of {size}")

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        self._store.move(moves)
