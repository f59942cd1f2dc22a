"""What an emulated model is like: how long a pass takes, and which guesses are right. Without torch: plans read it."""

from __future__ import annotations

from dataclasses import dataclass

ALTERNATIVES = (4 / 7, 2 / 7, 1 / 7)
"""Where the truth stands among a drafter's further guesses, when it is among them."""


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
