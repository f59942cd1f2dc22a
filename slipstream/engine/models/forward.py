"""A model's forward pass as the engine sees it: the step plan in, logits out."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from slipstream.engine.attention.packed import Attender


class ForwardStep(Attender, Protocol):
    """What a forward pass reads of a step. Tensors only, so that a pass can be captured and replayed."""

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


class Forward(Protocol):
    def reserve(self, length: int) -> None:
        """Positions below `length` may be asked for from now on."""
        ...

    def __call__(self, step: ForwardStep) -> torch.Tensor:
        """Logits [R, V] of the wanted rows, in the model's dtype."""
        ...


class LibraryForward:
    """The library's own modelling code, with packed attention plugged in. `mapped`: its layers are on several
    devices."""

    def __init__(self, model: Any, *, mapped: bool = False) -> None:
        self.model = model
        self._mapped = mapped

    def reserve(self, length: int) -> None:
        pass

    def __call__(self, step: ForwardStep) -> torch.Tensor:
        output = self.model(
            input_ids=step.tokens,
            position_ids=step.positions,
            use_cache=False,
            # The library picks these rows wherever the last layer left them; only a list serves on any device.
            logits_to_keep=step.wanted.tolist() if self._mapped else step.wanted,
            plan=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
