"""The drafters of one session: who guesses for it now, who failed it, and who replaces whom."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.breaker import BreakerState
from gateway.routing.drafters import DrafterWorker
from gateway.routing.router import Router, best_of_each, method, pool
from gateway.sessions.verifier_session import Received
from slipstream.errors import LINK_LOST
from slipstream.v1 import verifier_pb2

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often a session looks for drafters that it lacks. Only while it hears of rounds; nothing waits for this."""
AWAY_S = 1.0
LONGEST_AWAY_S = 60.0


@dataclass(slots=True)
class Absence:
    """Of a drafter that refused this session or was quarantined for it."""

    times: int = 0
    until: float = -math.inf


class DrafterAssignment:
    """Owns the session's place in every drafter's breaker. Plain functions: nothing here waits."""

    def __init__(self, plan: ResolvedRequest, router: Router) -> None:
        self._router = router
        self._wants = plan.max_draft_tokens > 0
        self._model = plan.model
        self._drafting = plan.drafting
        self._shadows = plan.shadows
        self._members: list[DrafterWorker] = []
        self._broken: set[DrafterWorker] = set()
        """Members without a link to the verifier, which mends it if it can."""
        self._absent: dict[DrafterWorker, Absence] = {}
        self._looked_at = -math.inf
        for address in plan.drafters:
            drafter = router.drafter(address.name)
            if drafter is not None and drafter.breaker.admits(self, router.clock()):
                self._join(drafter)

    @property
    def addresses(self) -> list[verifier_pb2.DrafterAddress]:
        """Its shadows', as far as they can work now, too: whether one fails is nobody's concern here."""
        watching = self._router.watching(self._model, self._shadows)
        served = [member.as_address() for member in self._members]
        return [*served, *(drafter.as_address(shadow=True) for drafter in watching)]

    @property
    def occupancy(self) -> float:
        """Drafters that the session has, each divided by all the sessions that it has."""
        return sum(1.0 / max(1, member.sessions) for member in self._members)

    def learn(self, news: Received) -> None:
        """What the verifier says of the drafters."""
        for event in news.events:
            drafter = self._router.drafter(event.drafter)
            if drafter is None:
                continue
            if event.HasField("failure"):
                self._failed(drafter, event)
            else:
                self._broken.discard(drafter)
        now = self._router.clock()
        trying = [member for member in self._members if member.breaker.state(now) is not BreakerState.CLOSED]
        if trying:
            delivered = {share.drafter for done in news.rounds for share in done.drafters if share.drafted}
            for member in trying:
                if member.name in delivered:
                    member.breaker.succeeded(self, now)
                    log.info(
                        "drafter %s delivered again; its breaker is %s", member.name, member.breaker.state(now).value
                    )

    def look(self, length: int, *, hurry: bool) -> bool:
        """Whether the session, now `length` tokens long, should have other drafters from now on: `addresses` has them.

        Looks again only after a while, unless there is reason to `hurry`.
        """
        now = self._router.clock()
        if not self._wants or not (hurry or now - self._looked_at >= LOOK_S):
            return False
        self._looked_at = now
        present = [member for member in self._members if not member.closed]
        working = [m for m in present if m not in self._broken and not m.draining and m.holds(length)]
        others = [
            drafter
            for drafter in self._router.able(self._model, self._drafting)
            if drafter not in self._members and self._may(drafter, length, now)
        ]
        crew = self._fill(working, others)
        # A member that cannot work now is better than none: its link may come back, it may drain for long.
        crew = self._fill(crew, [m for m in present if m not in working and self._may(m, length, now)])
        if set(crew) == set(self._members):
            return False
        for member in list(self._members):
            if member not in crew:
                self._part(member)
        for drafter in crew:
            if drafter not in self._members:
                self._join(drafter)
        return True

    def moved(self) -> None:
        """The session is opened on another verifier, whose links may be up."""
        self._broken.clear()

    def disband(self) -> None:
        """The session is over."""
        for member in list(self._members):
            self._part(member)

    def _fill(self, crew: Sequence[DrafterWorker], others: Sequence[DrafterWorker]) -> list[DrafterWorker]:
        """The crew and the least loaded other for everything that it lacks: a named drafter, or a method."""
        kind = pool if self._drafting.names else method
        filled = {kind(member) for member in crew}
        return [*crew, *best_of_each(kind, (other for other in others if kind(other) not in filled))]

    def _may(self, drafter: DrafterWorker, length: int, now: float) -> bool:
        absence = self._absent.get(drafter)
        return drafter.holds(length) and (absence is None or now >= absence.until) and drafter.breaker.admits(self, now)

    def _failed(self, drafter: DrafterWorker, event: verifier_pb2.DrafterEvent) -> None:
        now = self._router.clock()
        before = drafter.breaker.state(now)
        drafter.breaker.failed(self, event.failure, now)
        if (after := drafter.breaker.state(now)) is not before:
            log.warning("drafter %s failed (%s); its breaker is %s", drafter.name, event.failure.reason, after.value)
        if drafter not in self._members:
            return
        if event.failure.reason == LINK_LOST:
            self._broken.add(drafter)
            return
        self._part(drafter)
        absence = self._absent.setdefault(drafter, Absence())
        absence.until = now + min(LONGEST_AWAY_S, AWAY_S * 2.0**absence.times)
        absence.times += 1

    def _join(self, drafter: DrafterWorker) -> None:
        drafter.breaker.enter(self, self._router.clock())
        drafter.users += 1
        self._members.append(drafter)

    def _part(self, drafter: DrafterWorker) -> None:
        drafter.breaker.leave(self)
        drafter.users -= 1
        self._members.remove(drafter)
        self._broken.discard(drafter)
