"""Which candidates of a session a step may verify, the best first, and how likely each is after calibration."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from slipstream.speculation.selection import Selection
from slipstream.tenants import PerTenant
from verifier_svc.estimators.calibration import Calibration
from verifier_svc.execution.executor import ExecutorLimits
from verifier_svc.scheduling.budget import Offer
from verifier_svc.session import CandidateChoice, Session

LONG_CONTEXTS = (2048, 8192, 32768)
"""Tokens from which on acceptance is measured apart: draft heads are trained on shorter texts."""
POOL = 3
"""Candidates of several drafters, the likeliest by their claims, that compete for each place of a step."""
NO_CANDIDATES = Selection()
NO_CHOICE = CandidateChoice(-1, 0, NO_CANDIDATES, [])


class OfferedSession(NamedTuple):
    """A session that decodes, with the candidates that it has for the step."""

    session: Session
    selection: Selection
    offer: Offer | None
    """Offer that it competes with; None under the ratio rule, where all of `selection` has its place."""


class CandidateOffers:
    def __init__(self, limits: ExecutorLimits, calibrations: PerTenant[Calibration]) -> None:
        self._limits = limits
        self._calibrations = calibrations

    def of(self, sessions: list[Session], room: int) -> list[OfferedSession]:
        """Returns the sessions' offers for a step with room for so many candidates."""
        # Under the ratio rule the number of nodes must not depend on the tokens that were drawn, so these sessions do
        # not compete: each has its share of the room, set aside before any candidates are looked at.
        share = room // max(1, len(sessions))
        drawn = {
            each: self.select(each, min(self.limit(each), share)) for each in sessions if each.request.sampling.drawn
        }
        room -= sum(map(len, drawn.values()))
        groups = {tenant: group for group, tenant in enumerate(dict.fromkeys(each.request.tenant for each in sessions))}
        found: list[OfferedSession] = []
        for session in sessions:
            if session in drawn:
                found.append(OfferedSession(session, drawn[session], None))
                continue
            limit = self.limit(session)
            choice = self._choose(session, min(limit, room))
            found.append(
                OfferedSession(session, choice.selection, Offer(choice.paths, limit, groups[session.request.tenant]))
            )
        return found

    def limit(self, session: Session) -> int:
        """Most candidates of the session that a step can verify."""
        return min(session.draft_limit, self._limits.max_candidates)

    def paths(self, session: Session, chosen: Selection) -> list[float]:
        """Calibrated path probabilities."""
        calibration = self._calibrations[session.request.tenant]
        return calibration.path_probabilities(labels(session, chosen), workload(session), chosen)

    def _choose(self, session: Session, limit: int) -> CandidateChoice:
        """A coupled session's best candidates. While a step is held back, it is planned again whenever candidates
        arrive, and most sessions' trees are as they were."""
        if session.tree.empty:
            return NO_CHOICE
        known, version = session.choice, session.tree.version
        if known is None or known.version != version or known.limit != limit:
            known = session.choice = CandidateChoice(version, limit, *self._likeliest(session, limit))
        return known

    def _likeliest(self, session: Session, limit: int) -> tuple[Selection, list[float]]:
        """A coupled session's best candidates and their calibrated path probabilities. One drafter's claims put its own
        candidates in about the right order; those of several drafters cannot be compared before they are calibrated."""
        if not (session.tree.merged and self._limits.verifies_trees):
            selection = self.select(session, limit)
            return selection, self.paths(session, selection)
        claimed = self.select(session, POOL * limit)
        return claimed.likeliest(self.paths(session, claimed), limit)

    def select(self, session: Session, limit: int) -> Selection:
        """Candidates of a form that the executor can verify: the likeliest ones, or under the ratio rule the first ones
        drawn (of a chain the first children), whatever their tokens are."""
        tree, trees = session.tree, self._limits.verifies_trees
        if not session.request.sampling.drawn:
            return tree.select_likeliest(limit) if trees else tree.select_likeliest_chain(limit)
        return tree.select_first_created(limit) if trees else tree.select_first_children(limit)


def labels(session: Session, chosen: Selection) -> list[str]:
    """Label of the drafters that sent each node; confidences are calibrated by it."""
    return [session.source_label(sources) for sources in chosen.sources]


def workload(session: Session) -> str:
    """The kind of work with how long its context is, for a drafter may be good at one length and bad at another; and a
    lossy rule, which accepts more."""
    at = bisect_right(LONG_CONTEXTS, len(session.tokens))
    found = f"{session.request.workload} beyond {LONG_CONTEXTS[at - 1]} tokens" if at else session.request.workload
    return f"{found}, {session.request.sampling.acceptance}" if session.request.sampling.lossy else found
