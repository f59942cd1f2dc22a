"""What a client may know of an output token: how likely the model found it, and what stood beside it.

The definition is log-softmax in float32 of the target's raw logits, before a grammar's mask, penalties, bias,
temperature and cuts: what the model says, not what it was made to say.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOP = 20
"""Likeliest tokens that can be asked for in each place."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    """Natural logarithm; -inf for a token that the model itself excludes."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place with theirs, best first; equal ones from the lowest id up."""
