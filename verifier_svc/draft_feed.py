"""Draft tokens that the target's executor brings along with a step's tokens, on their way to the sessions' trees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from verifier_svc.session import DraftedSession, Session


class StepDraft(NamedTuple):
    """Draft tokens of one session behind a step."""

    base: int
    """Committed tokens before them, those of the step included."""
    token_ids: list[int]
    log_probs: list[float]
    """Log-probability of each, given those before it."""


class DraftFeed:
    """Filled on the model's thread, which runs no step while the event loop empties it."""

    def __init__(self) -> None:
        self._wanting: dict[DraftedSession, bool] = {}
        """By subscribed session, whether draft tokens are wanted for it now."""
        self._drafts: dict[DraftedSession, StepDraft] = {}

    def subscribe(self, session: DraftedSession, *, wanting: bool) -> None:
        """From the next step of the session on; also to change what is wanted."""
        self._wanting[session] = wanting

    def unsubscribe(self, session: DraftedSession) -> None:
        self._wanting.pop(session, None)
        self._drafts.pop(session, None)

    def wanted(self, sessions: Iterable[Session]) -> bool:
        """Whether a step over these sessions shall draft behind its tokens."""
        return any(self._wanting.get(session, False) for session in sessions)

    def deliver(self, session: Session, draft: StepDraft) -> None:
        if session in self._wanting:
            self._drafts[session] = draft

    def take(self) -> dict[DraftedSession, StepDraft]:
        """The drafts that came since the last call."""
        taken, self._drafts = self._drafts, {}
        return taken
