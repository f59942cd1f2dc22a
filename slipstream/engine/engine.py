"""The engine's interface: what drafters and verifiers ask of a model, and what a forward pass returns.

`TorchEngine` runs a model, `EmulatedEngine` only takes its time. The forward pass belongs to the model's own thread;
`slipstream.engine.kvcache.kv_cache` shows the life of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.segment import KVSequence, Segment
from slipstream.errors import Unavailable


@dataclass(frozen=True, slots=True)
class HiddenRequest:
    """The hidden states that a forward pass returns besides its logits: always the last one, which Medusa and EAGLE-1
    read, and those of `layers`, which EAGLE-3 reads."""

    layers: tuple[int, ...] = ()
    """Number i is the residual stream that enters layer i: `hidden_states[i]` in transformers, the numbering of
    `eagle_aux_hidden_state_layer_ids`. 0 is the embeddings. Formats that count layer outputs mean i + 1."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Rows of all tokens of a step, whether they got logits or not: per segment its pending tokens, then its nodes."""

    last: torch.Tensor
    """[tokens, hidden], behind the final norm, in the model's dtype: what the output head reads."""
    layers: Mapping[int, torch.Tensor]
    """[tokens, hidden] by the layer's number."""

    @property
    def size_bytes(self) -> int:
        return int(self.last.nbytes + sum(rows.nbytes for rows in self.layers.values()))

    def cut(self, first: int, end: int) -> HiddenStates:
        """Rows `first` up to `end`, as views."""
        return HiddenStates(self.last[first:end], {number: rows[first:end] for number, rows in self.layers.items()})

    @classmethod
    def join(cls, parts: list[HiddenStates]) -> HiddenStates:
        """The rows of one or more parts with the same layers, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        layers = {number: torch.cat([part.layers[number] for part in parts]) for number in parts[0].layers}
        return cls(torch.cat([part.last for part in parts]), layers)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    logits: torch.Tensor
    """[rows, vocabulary]: per segment that wants logits, in order, the row of its last pending token, then one row per
    node, or the rows of `Segment.wanted`."""
    hidden: HiddenStates | None = None
    """None unless they were requested."""


class EngineLost(Unavailable):
    """The engine can run no further step: its process ends, and its sessions go on elsewhere."""


class Engine(Protocol):
    model: ModelInfo
    batch_invariant: bool
    """`slipstream.engine.attention.plan.AttentionPlan`; may be set."""
    kv: KVCache

    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        """One packed pass; the logits are fp32. Lengths do not advance; call `KVCache.keep` for each segment to go on.
        The next forward of a segment that is not kept writes over its rows. Without a request no hidden state is kept.

        Raises InvalidArgument for a malformed segment or a layer that does not exist, FailedPrecondition for hidden
        states of an engine that has none, OutOfRange beyond the reserved capacity or, for committed tokens, the model's
        maximum length. Nodes beyond that length get rows that mean nothing. An error leaves every sequence as it was.
        """
        ...


class ChainEngine(Engine, Protocol):
    """An engine of chains, which goes on from what it computed without the host: a pass may read a token that only the
    device knows. Its `forward` takes segments that are chains, and gives the logits of their last tokens alone."""

    max_sequences: int
    """Most sequences of one pass."""
    max_tokens: int
    """Most tokens of one pass."""
    max_pending: int
    """Most committed tokens of one sequence in one pass; the rest of `max_tokens` is for its candidates."""

    def extend(self, sequences: Sequence[KVSequence], tokens: torch.Tensor) -> torch.Tensor:
        """Computes one more token, int64 [N] on the device, behind what the last pass computed of each sequence.
        Returns the logits float32 [N, V] behind it; waits for nothing. Raises OutOfRange where there is no room."""
        ...

    def fetch(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors on the host, by one copy, which waits for all passes."""
        ...
