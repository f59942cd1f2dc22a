"""A model's forward pass as the engine sees it: the step plan in, logits and hidden states out."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from slipstream.engine.attention.packed import Attender
from slipstream.engine.engine import HiddenRequest, HiddenStates, ModelOutput
from slipstream.engine.kernels.attention import PagedLayer, PagedStep
from slipstream.errors import FailedPrecondition


class ForwardStep(Attender, Protocol):
    """The inputs of a forward pass."""

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [1, T]."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """int64 [1, T]."""
        ...

    @property
    def wanted(self) -> torch.Tensor:
        """int64 [R]: the rows of T that need logits."""
        ...

    def paged(self, layers: tuple[PagedLayer, ...]) -> PagedStep | None:
        """The attention of all layers of the model by the kernel, where there is one for each of them."""
        ...


class Forward(Protocol):
    @property
    def path(self) -> str:
        """Which code computes it: "kernels" (compiled, all layers in one call), "lean" (ours, by torch's operators) or
        "library". Two paths give a row the same logits but for rounding."""
        ...

    def reserve(self, length: int) -> None:
        """Positions below `length` may be asked for from now on."""
        ...

    def __call__(self, step: ForwardStep, hidden: HiddenRequest | None = None) -> ModelOutput:
        """Logits [R, V] of the wanted rows and the requested hidden states of all rows, in the model's dtype."""
        ...


class LibraryForward:
    """The library's own modelling code, with packed attention plugged in."""

    path = "library"

    def __init__(self, model: Any) -> None:
        self.model = model

    def reserve(self, length: int) -> None:
        pass

    def __call__(self, step: ForwardStep, hidden: HiddenRequest | None = None) -> ModelOutput:
        count = 0 if hidden is None else self.model.config.get_text_config(decoder=True).num_hidden_layers
        output = self.model(
            input_ids=step.tokens,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=step.wanted,
            plan=step,
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
