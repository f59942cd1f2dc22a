"""What a simulated verifier awaits of its drafters: that part of `verifier_svc.sources.source`."""

from __future__ import annotations

from capacity.agenda import Agenda
from capacity.drafting import SimulatedDrafter
from capacity.session import SimulatedSession
from verifier_svc.wait_policy.arrival_times import ArrivalTimes, DelayDistribution


class Attachments:
    """Of one verifier's sessions, which have a drafter."""

    def __init__(self, agenda: Agenda, max_draft_tokens: int) -> None:
        self._agenda = agenda
        self._max_draft_tokens = max_draft_tokens
        self._paces: dict[SimulatedDrafter, ArrivalTimes] = {}

    def opened(self, session: SimulatedSession) -> None:
        self._await(session)

    def arrived(self, session: SimulatedSession) -> None:
        """Candidates came."""
        session.delays.came(self._agenda.now - session.since)
        session.fresh = False
        session.version += 1
        self._await(session)

    def committed(self, session: SimulatedSession, *, answering: bool) -> None:
        """Candidates on a new root are awaited. `answering`: the drafter was to send some until now."""
        if answering:
            session.delays.missed(self._agenda.now - session.since)
        session.fresh = session.fresh or not session.tree.holds(1, self._agenda.now)
        self._await(session)

    def awaited(self, session: SimulatedSession) -> tuple[DelayDistribution, float]:
        """How long its next candidates take, and for how many seconds they have been awaited."""
        return session.delays, self._agenda.now - session.since

    def _await(self, session: SimulatedSession) -> None:
        assert session.drafter is not None
        if session.drafter not in self._paces:
            self._paces[session.drafter] = ArrivalTimes()
        pace = self._paces[session.drafter]
        session.since = self._agenda.now
        if session.fresh:
            session.delays = pace.first
        else:
            enough = session.tree.holds(self._max_draft_tokens, self._agenda.now)
            session.delays = pace.enough if enough else pace.few
