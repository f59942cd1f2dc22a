"""The drafters that one session has now, those that failed it, and which replaces which."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.breaker import BreakerState
from gateway.routing.drafters import DrafterWorker
from gateway.routing.router import METHOD, POOL, Router, least_loaded_of_each
from gateway.routing.verifier_session import Received
from slipstream.errors import LINK_LOST
from slipstream.v1 import verifier_pb2

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks for drafters that a session lacks. It looks only when rounds come; nothing waits for it."""
ABSENCE_S = 1.0
LONGEST_ABSENCE_S = 60.0


@dataclass(slots=True)
class Absence:
    """A drafter refused this session or was quarantined for it, and is not assigned again until a later time."""

    times: int = 0
    until: float = -math.inf
    """Monotonic seconds."""


class DrafterAssignment:
    """Enters and leaves the drafters' circuit breakers for the session. Nothing here waits."""

    def __init__(self, resolved: ResolvedRequest, router: Router) -> None:
        self._router = router
        self._wants = resolved.max_draft_tokens > 0
        self._model = resolved.model
        self._drafting = resolved.drafting
        self._tenant = resolved.drafting.tenant
        self._shadows = resolved.shadows
        self._members: list[DrafterWorker] = []
        self._broken: set[DrafterWorker] = set()
        """Members without a link to the verifier, which restores it if it can."""
        self._absent: dict[DrafterWorker, Absence] = {}
        self._looked_at = -math.inf
        for address in resolved.drafters:
            drafter = router.drafter(address.name)
            if drafter is not None and drafter.breaker.admits(self, router.clock(), self._tenant):
                self._add(drafter)

    @property
    def addresses(self) -> list[verifier_pb2.DrafterAddress]:
        """Addresses for the verifier: the members', and those of shadows that can work now. A shadow that fails is not
        replaced."""
        shadows = self._router.choose_shadows(self._model, self._shadows)
        serving = [member.as_address() for member in self._members]
        return [*serving, *(drafter.as_address(shadow=True) for drafter in shadows)]

    @property
    def occupancy(self) -> float:
        """Drafters that the session occupies: the sum over its drafters of 1 / sessions of that drafter."""
        return sum(1.0 / max(1, member.sessions) for member in self._members)

    def apply_received(self, received: Received) -> None:
        """Update links and breakers by what the verifier reports of the drafters."""
        for event in received.events:
            drafter = self._router.drafter(event.drafter)
            if drafter is None:
                continue
            if event.HasField("failure"):
                self._handle_failure(drafter, event)
            else:
                self._broken.discard(drafter)
        now = self._router.clock()
        tenant, closed = self._tenant, BreakerState.CLOSED
        half_open = [member for member in self._members if member.breaker.state(now, tenant) is not closed]
        if half_open:
            delivered = {share.drafter for done in received.rounds for share in done.drafters if share.drafted}
            for member in half_open:
                if member.name in delivered:
                    member.breaker.succeeded(self, now, tenant)
                    log.info(
                        "drafter %s sent candidates again; its breaker is %s",
                        member.name,
                        member.breaker.state(now, tenant).value,
                    )

    def reassign(self, length: int, *, hurry: bool) -> bool:
        """Choose drafters for the session, now `length` tokens long; whether they changed: `addresses` has them.

        Does nothing within LOOK_S of the last choice, unless there is reason to `hurry`.
        """
        now = self._router.clock()
        if not self._wants or not (hurry or now - self._looked_at >= LOOK_S):
            return False
        self._looked_at = now
        present = [member for member in self._members if not member.closed]
        working = [m for m in present if m not in self._broken and not m.draining and m.holds(length)]
        others = [
            drafter
            for drafter in self._router.candidates_for(self._model, self._drafting)
            if drafter not in self._members and self._may_join(drafter, length, now)
        ]
        chosen = self._fill_gaps(working, others)
        # A member that cannot work now is better than none: its link may come back, it may drain for long.
        chosen = self._fill_gaps(chosen, [m for m in present if m not in working and self._may_join(m, length, now)])
        if set(chosen) == set(self._members):
            return False
        for member in list(self._members):
            if member not in chosen:
                self._remove(member)
        for drafter in chosen:
            if drafter not in self._members:
                self._add(drafter)
        return True

    def forget_lost_links(self) -> None:
        """The session is opened on another verifier, whose links may be up."""
        self._broken.clear()

    def release_all(self) -> None:
        """Leave every drafter: the session is over here."""
        for member in list(self._members):
            self._remove(member)

    def _fill_gaps(self, chosen: Sequence[DrafterWorker], others: Sequence[DrafterWorker]) -> list[DrafterWorker]:
        """The chosen, and the least loaded of the others for each named drafter, or else method, that they lack."""
        key = POOL if self._drafting.names else METHOD
        filled = {key(member) for member in chosen}
        return [*chosen, *least_loaded_of_each(key, (other for other in others if key(other) not in filled))]

    def _may_join(self, drafter: DrafterWorker, length: int, now: float) -> bool:
        absence = self._absent.get(drafter)
        returns = absence is None or now >= absence.until
        return drafter.holds(length) and returns and drafter.breaker.admits(self, now, self._tenant)

    def _handle_failure(self, drafter: DrafterWorker, event: verifier_pb2.DrafterEvent) -> None:
        now = self._router.clock()
        before = drafter.breaker.state(now, self._tenant)
        drafter.breaker.failed(self, event.failure, now, self._tenant)
        if (after := drafter.breaker.state(now, self._tenant)) is not before:
            log.warning("drafter %s failed (%s); its breaker is %s", drafter.name, event.failure.reason, after.value)
        if drafter not in self._members:
            return
        if event.failure.reason == LINK_LOST:
            self._broken.add(drafter)
            return
        self._remove(drafter)
        absence = self._absent.setdefault(drafter, Absence())
        absence.until = now + min(LONGEST_ABSENCE_S, ABSENCE_S * 2.0**absence.times)
        absence.times += 1

    def _add(self, drafter: DrafterWorker) -> None:
        drafter.breaker.enter(self, self._router.clock(), self._tenant)
        drafter.users += 1
        self._members.append(drafter)

    def _remove(self, drafter: DrafterWorker) -> None:
        drafter.breaker.leave(self, self._tenant)
        drafter.users -= 1
        self._members.remove(drafter)
        self._broken.discard(drafter)
