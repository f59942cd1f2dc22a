"""The interface between an acceptance rule and the target: what a rule requests, and the result it returns.

A rule is a generator over one session's selected candidates. It yields a request about one node, is sent the answer,
and returns an `AcceptanceResult`. So a rule is a pure function that is read from top to bottom, only visited nodes cost
anything, and `judge` can run the rules of all sessions in lockstep with one batched call for each level.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.speculation.sampling_params import TokenLogprobs

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choose:
    """Asks for the target's own token after this node (ROOT: after the prefix). Answer: int."""

    node: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """Asks for p after this node. Answer: float64 [V], which sums to one and which the rule may overwrite."""

    node: int


Request = Choose | Distribution


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    path: tuple[int, ...]
    """Accepted nodes: indices of the selection, from the root down."""
    next_token: int
    """The recovered token after a rejection, the bonus token after full acceptance."""
    dishonest: bool = False
    """A draft token lay outside its own q: the drafter lies or is broken, and must not be believed again."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the accepted tokens and the next one, where the session asked for them; added after the
    rule returned."""
    window: tuple[int, ...] = ()
    """The target's likeliest tokens behind the newest rows of the sequence's lookahead window; -1 where its numbers
    are broken. No rule sets it."""


@dataclass(frozen=True, slots=True)
class BrokenNumbers:
    """The target's numbers after this node are NaN, or no token is left. The session fails; others are unharmed."""

    node: int
    error: SlipstreamError | None = None
    """Where nothing is wrong with the numbers: why no token can be chosen."""


Rule = Generator[Request, Any, AcceptanceResult]
