"""vLLM's own speculator as a source of candidates: its draft tokens come with each step's tokens (`DraftFeed`), and
join the sessions' trees before the next step is planned. No step waits for it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from itertools import takewhile

from slipstream.errors import FailedPrecondition, SlipstreamError
from slipstream.proposers.registry import IN_VERIFIER, SPECULATOR
from slipstream.speculation.frame import Frame, check
from verifier_svc.draft_feed import DraftFeed, StepDraft
from verifier_svc.session import DraftedSession
from verifier_svc.sources.source import Attachment, SourceContext
from verifier_svc.wait_policy.arrival_times import ArrivalTimes


@dataclass(slots=True, eq=False)
class SpeculatedSession(Attachment):
    """One session on the speculator."""

    generation: int = field(default=0, kw_only=True)
    """Number of its last frame: each holds the whole chain of one root."""


class SpeculatorSource:
    """The speculator of one executor and the sessions that have it."""

    address = IN_VERIFIER + SPECULATOR
    up = True
    once_a_round = False

    def __init__(self, feed: DraftFeed, context: SourceContext) -> None:
        self._feed, self._context = feed, context
        self._arrival_times = ArrivalTimes()
        self._sessions: dict[DraftedSession, SpeculatedSession] = {}

    async def run(self) -> None:
        """Its draft tokens come with the steps."""
        await asyncio.Event().wait()

    def open(self, session: DraftedSession, name: str) -> None:
        known = self._sessions.get(session)
        if known is not None:
            known.name = name
            session.name_source(known.number, name)
            return
        context = self._context
        attachment = SpeculatedSession(session, self._arrival_times, name, next(context.numbers), context.clock())
        try:
            _check(session)
        except SlipstreamError as error:
            self._give_up(attachment, error)
            return
        session.name_source(attachment.number, name)
        self._sessions[session] = attachment
        self._feed.subscribe(session, wanting=self._wants(session))

    def close(self, session: DraftedSession) -> None:
        attachment = self._sessions.pop(session, None)
        if attachment is not None:
            session.tree.forget(attachment.number)
            self._feed.unsubscribe(session)

    def root_moved(self, session: DraftedSession) -> None:
        """Candidates on the new root came with the step that moved it."""

    def committed(self, session: DraftedSession, base: int, token_ids: list[int]) -> None:
        """The target's workers know what they decided."""

    def collect(self) -> None:
        for session, draft in self._feed.take().items():
            attachment = self._sessions.get(session)
            if attachment is not None and draft.base == len(session.tokens):  # else the session kept less of the step
                self._graft(attachment, draft)

    def step_held(self, session: DraftedSession) -> None:
        pass

    def awaited(self, session: DraftedSession) -> Attachment | None:
        return None

    def policy_changed(self, session: DraftedSession) -> None:
        if session in self._sessions:
            self._feed.subscribe(session, wanting=self._wants(session))

    def quarantine(self, session: DraftedSession, error: SlipstreamError) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:
            self.close(session)
            self._give_up(attachment, error)

    def _wants(self, session: DraftedSession) -> bool:
        return self._context.wants(session) and session.request.max_draft_tokens > 0

    def _give_up(self, attachment: SpeculatedSession, error: SlipstreamError) -> None:
        self._context.detach(attachment.session, self)
        attachment.report_given_up(error)

    def _graft(self, attachment: SpeculatedSession, draft: StepDraft) -> None:
        """Adds the chain to the session's tree, in place of the one before."""
        session = attachment.session
        log_probs = tuple(takewhile(math.isfinite, draft.log_probs))
        attachment.generation += 1
        token_ids = tuple(draft.token_ids[: len(log_probs)])
        frame = Frame(draft.base, attachment.generation, 1, token_ids, log_probs, source=attachment.number)
        try:
            self._context.graft(session, check(frame, self._context.target.vocabulary_size, session.tree.limits))
        except SlipstreamError as error:
            self._context.dropped["invalid"] += len(token_ids)
            self.quarantine(session, error)


def _check(session: DraftedSession) -> None:
    """Raises FailedPrecondition for a session that the speculator cannot serve."""
    if session.request.sampling.drawn:
        raise FailedPrecondition(
            "drafter speculator samples from no distribution, which the rule "
            f"{session.request.sampling.acceptance!r} needs; use the coupled rule.",
            reason="NO_DISTRIBUTION",
        )
    if not session.served:
        raise FailedPrecondition(
            "drafter speculator drafts in the target's steps, of which a shadow has none; let it serve.",
            reason="HIDDEN_STATES_MISSING",
        )
