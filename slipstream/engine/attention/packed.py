"""Packed attention: a loop over sessions inside one flat [1, H, T, D] call.

Registered with the library under one name *without* a mask entry, so models build no mask of their own. The step plan
is that of the context (`planned`), since not every family hands keywords of `model(...)` down to its layers. A loop
beats padding because sessions differ in length, and each session's result does not depend on the other sessions of the
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from slipstream.errors import FailedPrecondition

NAME = "slipstream"
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attending(Protocol):
    """An attention layer, the library's or ours."""

    @property
    def layer_idx(self) -> Any: ...


class Attender(Protocol):
    """The plan of one pass: computes the attention of each of its sessions."""

    @property
    def positions(self) -> torch.Tensor:
        """int64 [1, T]: positions of the pass's tokens in their texts."""
        ...

    def attend(self, module: Any, states: States, extras: dict[str, object]) -> torch.Tensor:
        """Returns [1, T, H, Dv] of query, key and value as `attention` takes them. `module`: the attention layer, the
        library's (`Attending`) or ours."""
        ...


_plan: ContextVar[Attender | None] = ContextVar("plan", default=None)


@contextmanager
def planned(plan: Attender) -> Iterator[None]:
    """A model that runs in this block computes these sessions."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def current_plan() -> Attender | None:
    """The plan of the `planned` block that runs; None outside of one."""
    return _plan.get()


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **extras: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, Dk]; key, value [1, Hkv, T, D] after rotation, not repeated. Returns [1, T, H, Dv]."""
    plan = _plan.get()
    if plan is None:
        raise FailedPrecondition(f"{type(module).__name__} is not reached by the step plan; the model cannot be packed")
    return plan.attend(module, (query, key, value), extras), None


def register() -> None:
    """Makes `attn_implementation=NAME` known to the library; calling it again is harmless."""
    from transformers.modeling_utils import AttentionInterface  # of which a checkpoint that is known needs nothing

    AttentionInterface.register(NAME, attention)


def explicit_attention(
    states: States, mask: torch.Tensor | None, scale: float, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention with what the fused kernel lacks: logit soft-capping (Gemma 2) and attention sinks (GPT-OSS).

    query [1, Hkv, rows, D], key and value [1, Hkv, L, D], mask [rows, L] additive, sinks [1, Hkv, rows, 1].
    """
    query, key, value = states
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()], dim=3)
    weights = scores.softmax(dim=3)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value
