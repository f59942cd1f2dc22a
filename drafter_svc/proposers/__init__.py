"""Proposers: one file for each way of guessing, behind one small protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from drafter_svc.session import Session
from slipstream.errors import SlipstreamError
from slipstream.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Turn:
    """What one session brings to one step: a snapshot, for the session goes on changing while the model runs."""

    session: Session
    generation: int
    computed: int
    pending: list[int]
    """Tokens after the first `computed` ones, at least one."""
    complete: bool
    """Whether `pending` reaches the end of the session's tokens, so that a guess can follow."""


@dataclass(frozen=True, slots=True)
class Guess:
    """One more node of a session's chain."""

    token: int
    log_prob: float
    proposal: Proposal | None = None


class Proposer(Protocol):
    """Called on the model's own thread only."""

    def grow(self, turns: list[Turn]) -> list[Guess | SlipstreamError | None]:
        """One step for many sessions: a guess each, None for an unfinished prefill, or the session's typed failure."""
        ...

    def close(self, session: Session) -> None:
        """Give back what the session holds; harmless twice."""
        ...
