"""The settings of an emulated model: how long a pass takes, and which candidates are right. Without torch, so that
capacity plans can read them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl

from slipstream.errors import InvalidArgument

EMULATED = "emulated:"
ALTERNATIVES = (4 / 7, 2 / 7, 1 / 7)
"""The shares with which the truth is a drafter's second, third and fourth candidate, when it is among them."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of one pass: base + per_token * (tokens beyond the free ones) + per_session * sessions; the free ones
    hide behind the reading of the weights."""

    base_s: float
    per_token_s: float = 0.0
    per_session_s: float = 0.0
    free_tokens: int = 0

    def __call__(self, tokens: int, sessions: int) -> float:
        return self.base_s + self.per_token_s * max(0, tokens - self.free_tokens) + self.per_session_s * sessions


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    """`acceptance` 1 is the target itself; a drafter agrees with it at that share of the positions. Where it does not,
    the truth is among its next candidates with probability `fanout`; its logits are the true probabilities of each
    candidate."""

    name: str = "emulated"
    vocabulary_size: int = 256
    max_length: int = 1 << 20
    acceptance: float = 1.0
    fanout: float = 0.0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    fault_every: int = 0
    """Number of passes of which the last one raises; 0: none does."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of `emulated:base_ms=20&token_ms=0&acceptance=0.8`."""

    base_ms: float = 0.0
    token_ms: float = 0.0
    session_ms: float = 0.0
    flat: float = 0
    """Tokens of a pass that cost nothing beyond its base."""
    acceptance: float = 1.0
    fanout: float = 0.0
    vocabulary: float = 256
    seed: float = 0
    fault_every: float = 0


def read_settings(name: str) -> tuple[EmulatedModel, LinearCost]:
    """The model and the cost of a pass that `emulated:...` stands for. Raises InvalidArgument for unknown settings and
    for values that are no finite numbers."""
    text = name.removeprefix(EMULATED)
    try:
        given = {key: float(value) for key, value in parse_qsl(text, strict_parsing=bool(text))}
        settings = _Settings(**given)
    except (TypeError, ValueError) as error:
        known = ", ".join(sorted(field.name for field in fields(_Settings)))
        raise InvalidArgument(f"{name} cannot be read; settings are {known}.") from error
    if not all(map(math.isfinite, given.values())):
        raise InvalidArgument(f"{name} has a setting without end; give finite numbers.")
    model = EmulatedModel(
        vocabulary_size=int(settings.vocabulary),
        acceptance=settings.acceptance,
        fanout=settings.fanout,
        seed=int(settings.seed),
        fault_every=int(settings.fault_every),
    )
    cost = LinearCost(settings.base_ms / 1e3, settings.token_ms / 1e3, settings.session_ms / 1e3, int(settings.flat))
    return model, cost
