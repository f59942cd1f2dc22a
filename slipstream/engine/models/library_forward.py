"""The forward pass by the library's own modelling code."""

from __future__ import annotations

from typing import Any

from slipstream.engine.attention.packed import planned
from slipstream.engine.engine import HiddenRequest, HiddenStates, ModelOutput
from slipstream.engine.forward import ForwardStep
from slipstream.engine.models.packed_library import pack_library
from slipstream.errors import FailedPrecondition


class LibraryForward:
    """The library's own modelling code, with packed attention plugged in, and on a CPU kernels of ours
    (`slipstream.engine.models.packed_library`). It takes the model's weights."""

    path = "library"

    def __init__(self, model: Any) -> None:
        self.model = model
        self._packed = pack_library(model)

    @property
    def uneven(self) -> frozenset[str]:
        return self._packed.uneven

    def reserve(self, length: int) -> None:
        for each in self._packed.rotations:
            each.reserve(length)

    def __call__(self, step: ForwardStep, hidden: HiddenRequest | None = None) -> ModelOutput:
        count = 0 if hidden is None else self.model.config.get_text_config(decoder=True).num_hidden_layers
        with self._packed.functions, planned(step):
            output = self.model(
                input_ids=step.tokens,
                position_ids=step.positions,
                use_cache=False,
                logits_to_keep=step.wanted,
                output_hidden_states=False if hidden is None else [*hidden.layers, count],
            )
        if hidden is None:
            return ModelOutput(output.logits[0])
        states = output.hidden_states
        # Gemma 3n has several residual streams.
        if states is None or len(states) != count + 1 or any(states[at].dim() != 3 for at in (*hidden.layers, count)):
            raise FailedPrecondition(
                f"{type(self.model).__name__} does not return one hidden state for each layer; "
                "choose a method that reads none.",
                reason="HIDDEN_STATES_MISSING",
            )
        layers = {number: states[number][0] for number in hidden.layers}
        return ModelOutput(output.logits[0], HiddenStates(states[count][0], layers))
