"""Shadows: drafters that propose for a session without serving it, and what their candidates would have brought.

Under the coupled rule and at temperature 0 a candidate is accepted iff it is the token that is committed in its place,
so no verification is needed: when a step of the session begins, the candidates that it would have taken from the shadow
are recorded, and the tokens committed from there on, in this round and the next ones, are followed through them. This
is exact.

**Rounds are the shadow's own.** Its next one begins with the first step that begins at or behind the end of its last
one: accepted candidates and the token after them. If it began with each step instead, a run of text that it knows would
be counted once for every step that the served drafters take through it, and a shadow of plain decoding would look
several times as good as it is. What stays: its rounds begin where steps begin, which is where served candidates failed,
and no step waited for it.

**Which candidates a step would have taken**: of the likeliest ones by path probability, at most the session's
`draft_limit`, those in front of the first whose calibrated path probability is not above the price of a place in a step
(`verifier_svc.wait_policy.draft_threshold`): the marginal form of the budget's rule. The calibration is the shadows'
own.

A shadow has a *double* of the session: its own list of committed tokens, its own tree, its own place in the grammar.
The double is in no step and has no KV; a drafter's link treats it as it treats any session, with the same checks and
limits, but learns no arrival times from it and wakes no scheduler for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.selection import ROOT, Selection
from slipstream.tenants import PerTenant
from slipstream.v1 import verifier_pb2
from verifier_svc.estimators.calibration import Calibration
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.rounds.observer import MessageAnnotator, StepObserver
from verifier_svc.rounds.round_result import RoundResult
from verifier_svc.session import DraftedSession, Session

log = logging.getLogger(__name__)


class ShadowRound:
    """The candidates of one round, and the path that the tokens committed since its start take through them."""

    def __init__(self, base: int, chosen: Selection) -> None:
        self.chosen = chosen
        self.path: list[int] = []
        self._base = base

    @property
    def end(self) -> int:
        """Committed length after the round."""
        return self._base + len(self.path) + 1

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Follows the tokens committed next; returns whether no later token can add to the accepted ones."""
        for token in token_ids:
            node = self.chosen.child(self._node, token)
            if node is None:
                return True
            self.path.append(node)
        return self.chosen.first_child(self._node) is None

    @property
    def _node(self) -> int:
        return self.path[-1] if self.path else ROOT


class Double:
    """The part of a session that sources need, with nothing in it that the session itself looks at."""

    served = False
    drafting = True
    """It is scored whatever the served drafters gain."""

    def __init__(self, session: Session, name: str) -> None:
        self.request = replace(session.request, stream=_Log(session.request.id, name))
        self.tokens = list(session.tokens)
        self.tree = CandidateTree(self.tokens)
        self._constraint = session.constraint
        if self._constraint is not None:
            prompt_length, recheck = self.request.prompt_length, self.tree.recheck
            self._constraint = self._constraint.beside(self.tokens, prompt_length, recheck)
            self.tree.admits = self._constraint.admits

    def name_source(self, source: int, drafter: str) -> None:
        """It has one drafter, whose name the shadow knows."""

    def commit(self, token_ids: list[int]) -> None:
        self.tokens.extend(token_ids)
        if self._constraint is not None:
            self._constraint.commit(token_ids)
        self.tree.commit(token_ids)


class ShadowDrafter:
    """One drafter of one session."""

    def __init__(self, session: Session, name: str) -> None:
        self.name = name
        self.double = Double(session, name)
        self._walk: ShadowRound | None = None
        """The present round, while it is not decided."""
        self._begins = 0
        """Committed length from which on its next round may begin."""

    def look(self, limit: int, price: float, calibration: Calibration) -> None:
        """A step of the session begins, which may take `limit` candidates, each at a cost of `price` tokens."""
        base = len(self.double.tokens)
        if self._walk is not None or base < self._begins:
            return
        chosen = self.double.tree.select_likeliest(limit)
        paths = calibration.path_probabilities(self._labels(chosen), self.double.request.workload, chosen)
        worth = next((index for index, path in enumerate(paths) if path <= price), len(paths))
        self._walk = ShadowRound(base, chosen.head(worth))

    def commit(self, token_ids: Sequence[int], calibration: Calibration) -> verifier_pb2.ShadowScore | None:
        """The score of the round that these tokens decide; None while they decide none."""
        double, walk = self.double, self._walk
        double.commit(list(token_ids))
        if walk is None:
            return None
        over = len(double.tokens) >= double.request.max_length or double.tokens[-1] in double.request.stop_token_ids
        decided = walk.follow(token_ids)
        if not decided and not over:  # nothing is committed behind the end
            return None
        if decided and len(walk.chosen):
            calibration.learn(self._labels(walk.chosen), double.request.workload, walk.chosen, walk.path)
        self._walk, self._begins = None, walk.end
        return verifier_pb2.ShadowScore(drafter=self.name, drafted=len(walk.chosen), accepted=len(walk.path))

    def _labels(self, chosen: Selection) -> list[str]:
        return [self.name] * len(chosen)


class DoubleSources(Protocol):
    """The verifier's sources as shadows use them: candidates for their doubles."""

    def assign_sources(self, session: DraftedSession, addresses: Iterable[verifier_pb2.DrafterAddress]) -> None: ...

    def release_sources(self, session: DraftedSession) -> None: ...

    def committed(self, session: DraftedSession, base: int, token_ids: list[int]) -> None: ...


class ShadowDrafters(StepObserver, MessageAnnotator):
    """The shadows of all sessions of a verifier. A session without any costs one dictionary lookup."""

    def __init__(self, sources: DoubleSources, clock: Callable[[], float]) -> None:
        self._sources = sources
        self._calibrations = PerTenant(lambda: Calibration(clock))
        self._of_session: dict[Session, dict[str, ShadowDrafter]] = {}

    def attach(self, session: Session, addresses: Sequence[verifier_pb2.DrafterAddress]) -> None:
        """The session's shadows are now these, by address. One for which there is no room is left out."""
        known = self._of_session.pop(session, {})
        wanted = {address.address: address for address in addresses}
        for address in known.keys() - wanted.keys():
            self._sources.release_sources(known[address].double)
        kept = {
            address: known.get(address) or ShadowDrafter(session, each.name or address)
            for address, each in wanted.items()
        }
        for address, shadow in kept.items():
            self._sources.assign_sources(shadow.double, [wanted[address]])
        if kept:
            self._of_session[session] = kept

    def detach(self, session: Session) -> None:
        for shadow in self._of_session.pop(session, {}).values():
            self._sources.release_sources(shadow.double)

    def step_started(self, step: list[ScheduledSequence], candidate_price: float) -> None:
        if self._of_session:
            for scheduled in step:
                if scheduled.complete:
                    session = scheduled.session
                    for shadow in self._of(session):
                        shadow.look(session.draft_limit, candidate_price, self._calibrations[session.request.tenant])

    def annotate_round(self, result: RoundResult, message: verifier_pb2.Round) -> None:
        """Adds the scores that the round's tokens decide."""
        if self._of_session:
            session, base = result.scheduled.session, result.scheduled.base
            for shadow in self._of(session):
                if (score := shadow.commit(result.token_ids, self._calibrations[session.request.tenant])) is not None:
                    message.shadows.append(score)
                self._sources.committed(shadow.double, base, result.token_ids)

    def _of(self, session: Session) -> Iterable[ShadowDrafter]:
        return self._of_session.get(session, {}).values()


class _Log:
    """Takes the place of the stream to the gateway, which gets nothing of a shadow but its scores."""

    def __init__(self, session_id: str, name: str) -> None:
        self._session_id, self._name = session_id, name

    def send(self, reply: verifier_pb2.Round | verifier_pb2.DrafterEvent) -> None:
        if isinstance(reply, verifier_pb2.DrafterEvent) and reply.HasField("failure"):
            log.info("the shadow %s failed: %s", self._name, reply.failure.message, extra={"session": self._session_id})

    def end(self, end: verifier_pb2.SessionEnd) -> None:
        """A double ends with its session."""
