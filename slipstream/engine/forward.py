"""A model's forward pass as the engine sees it: the step plan in, logits and hidden states out."""

from __future__ import annotations

from typing import Protocol

import torch

from slipstream.engine.attention.packed import Attender
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.kernels.attention import PagedLayer, PagedStep


class ForwardStep(Attender, Protocol):
    """The inputs of a forward pass."""

    @property
    def tokens(self) -> torch.Tensor:
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

    @property
    def uneven(self) -> frozenset[str]:
        """Torch's operators in it whose rows may depend on the other rows of a pass. Without any, a row has the same
        bits in every pass, where that is true of its attention."""
        ...

    def reserve(self, length: int) -> None:
        """Positions below `length` may be asked for from now on."""
        ...

    def __call__(self, step: ForwardStep, hidden: HiddenRequest | None = None) -> ModelOutput:
        """Logits [R, V] of the wanted rows and the requested hidden states of all rows, in the model's dtype."""
        ...
