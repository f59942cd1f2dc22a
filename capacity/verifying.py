"""A simulated verifier: batched steps over its sessions, planned by the very rules of the real one.

Budget, wait policy, arrival times and prefill are `verifier_svc`'s own; what is written again here in small is what
`verifier_svc.scheduling.planner` and `verifier_svc.scheduling.scheduler` put around them. Acceptance is known, so there
is no calibration.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from capacity.agenda import Agenda
from capacity.attachments import Attachments
from capacity.colocated import Serial
from capacity.cost import over
from capacity.drafting import SimulatedDrafter
from capacity.guessing import SimulatedGuess
from capacity.session import SimulatedSession
from capacity.step import SimulatedStep, Verifying
from slipstream.speculation.selection import ROOT
from verifier_svc.scheduling.budget import Offer, allot, prefill_chunks
from verifier_svc.wait_policy.arrival_times import DelayDistribution
from verifier_svc.wait_policy.draft_threshold import LEVELS, PAUSE
from verifier_svc.wait_policy.wait_policy import ExpectedGain, WaitPolicy


class SimulatedVerifier:
    def __init__(
        self,
        agenda: Agenda,
        settings: Verifying,
        random: random.Random,
        ended: Callable[[SimulatedVerifier, SimulatedSession], None],
    ) -> None:
        self._agenda = agenda
        self._settings = settings
        self._random = random
        self._ended = ended
        self._wait_policy = WaitPolicy[SimulatedSession](LEVELS[0], settings.max_wait_s, settings.cost)
        self._attachments = Attachments(agenda, settings.max_draft_tokens)
        self._serial = Serial(settings)
        self._sessions: dict[SimulatedSession, None] = {}
        self.waiting: list[SimulatedSession] = []
        """For room."""
        self._kv = 0
        self._count = 0
        self._busy = self._awake = False
        self._waiting_since: float | None = None
        self._plans = 0
        self.busy_s = 0.0
        self.steps = self.computed = 0
        """Steps taken; tokens computed in them."""

    def add(self, session: SimulatedSession) -> None:
        self._count += 1
        session.rank = self._count
        self.waiting.append(session)
        self._enter()
        self._wake()

    def arrived(self, sessions: list[SimulatedSession]) -> None:
        """Candidates of these came."""
        for session in sessions:
            if session in self._sessions:
                self._attachments.arrived(session)
        self._wake()

    def _enter(self) -> None:
        """As many as fit with all they will hold. The real one lets more in and takes KV back when it must."""
        while self.waiting and len(self._sessions) < self._settings.sessions:
            session = self.waiting[0]
            size = session.prompt + session.output
            if self._kv + size > self._settings.kv_tokens and self._sessions:
                break
            self._kv += size
            self._sessions[self.waiting.pop(0)] = None
            session.idle_since = self._agenda.now
            if session.drafter is not None:
                self._attachments.opened(session)
                self._say(session.drafter, partial(self._open, session.drafter, session))

    def _open(self, drafter: SimulatedDrafter, session: SimulatedSession) -> None:
        if session in self._sessions:
            drafter.add(session, self._wait_policy.threshold, self)

    def _say(self, drafter: SimulatedDrafter, what: Callable[[], None]) -> None:
        """It arrives."""
        self._agenda.at(self._agenda.now + drafter.delay_s, what)

    def _wake(self) -> None:
        """There may be something to start, when all that happens at this moment has happened."""
        if not self._busy and not self._awake:
            self._awake = True
            self._agenda.at(self._agenda.now, self._look)

    def _look(self) -> None:
        self._awake = False
        step = self._plan()
        if not step.size:
            return
        now = self._agenda.now
        waited = 0.0 if self._waiting_since is None else now - self._waiting_since
        pause = self._pause(step, waited)
        self._plans += 1
        if pause > 0.0:
            if self._waiting_since is None:
                self._waiting_since = now
            self._agenda.at(now + pause, partial(self._waited, self._plans))
            return
        self._waiting_since = None
        self._start(step, waited)

    def _waited(self, plan: int) -> None:
        if plan == self._plans:
            self._wake()

    def _pause(self, step: SimulatedStep, waited: float) -> float:
        """Seconds worth waiting before it, having waited so long already."""
        if step.reading:
            return 0.0
        gains = {
            session: self._expected_gain(session, nodes, paths)
            for session, nodes, paths in zip(step.decoding, step.chosen, step.paths, strict=True)
            if session.drafter is not None and self._settings.limit(session)
        }
        return self._wait_policy.pause(step, gains, self._awaited, waited)

    def _expected_gain(
        self, session: SimulatedSession, nodes: list[SimulatedGuess], paths: list[float]
    ) -> ExpectedGain:
        places = {id(node): place for place, node in enumerate(nodes)}
        parents = [places.get(id(node.parent), ROOT) for node in nodes]
        return self._wait_policy.expected_gain(session.version, paths, parents, self._settings.limit(session))

    def _awaited(self, session: SimulatedSession) -> tuple[DelayDistribution, float] | None:
        return self._attachments.awaited(session) if self._wanted else None

    @property
    def _wanted(self) -> bool:
        """Whether any candidates pay now."""
        return self._wait_policy.threshold < PAUSE

    def _plan(self) -> SimulatedStep:
        limits, now = self._settings, self._agenda.now
        decoding = sorted((s for s in self._sessions if not s.pending), key=lambda s: s.idle_since)
        prefilling = [session for session in self._sessions if session.pending]
        reserved = 0
        if decoding:
            most = min(limits.prefill_tokens, limits.step_tokens // 2)
            reserved = min(most, sum(session.pending for session in prefilling))
        decoding = decoding[: limits.step_tokens - reserved]
        self._serial.grow(decoding, now)
        room = limits.step_tokens - reserved - len(decoding)
        offers: list[Offer] = []
        offered: list[list[SimulatedGuess]] = []
        for session in decoding:
            limit = limits.limit(session)
            nodes, paths = session.tree.offer(now, min(limit, room)) if limit else ([], [])
            offers.append(Offer(paths, limit))
            offered.append(nodes)
        allotment = allot(offers, over(limits.cost, max(1, len(decoding))), room, len(decoding) + reserved)
        chosen = [nodes[:count] for nodes, count in zip(offered, allotment.counts, strict=True)]
        room = limits.step_tokens - sum(1 + len(nodes) for nodes in chosen)
        reading = prefill_chunks(prefilling, min(room, limits.prefill_tokens) if decoding else room)
        likely = [list(offer.probabilities) for offer in offers]
        seconds = allotment.seconds + self._serial.seconds(len(decoding))
        return SimulatedStep(decoding, chosen, likely, reading, allotment.tokens, seconds)

    def _start(self, step: SimulatedStep, waited: float) -> None:
        members = len(step.decoding) + len(step.reading)
        seconds = self._serial.seconds(len(step.decoding)) + self._settings.cost(step.size, members)
        seconds += self._serial.reading_s(sum(step.reading.values()), len(step.reading))
        self.busy_s += seconds
        self.steps += 1
        self.computed += step.size
        self._busy = True
        whole = seconds + self._settings.host_s + self._settings.host_session_s * members
        self._agenda.at(self._agenda.now + whole, partial(self._end, step, whole + waited))

    def _end(self, step: SimulatedStep, seconds: float) -> None:
        self._busy = False
        if not step.reading and self._wait_policy.observe_step(step, step.size, seconds):
            for session in self._sessions:
                if session.drafter is not None:
                    demand = partial(session.drafter.demand, session, self._wait_policy.threshold)
                    self._say(session.drafter, demand)
        for session, size in step.reading.items():
            session.pending -= size
        for session, nodes in zip(step.decoding, step.chosen, strict=True):
            self._commit(session, nodes)
        for session in step.reading:
            if not session.pending:
                self._commit(session, [])
        self._enter()
        self._wake()

    def _commit(self, session: SimulatedSession, nodes: list[SimulatedGuess]) -> None:
        draws = [self._random.random() for _ in range(min(session.left, len(nodes) + 1))]
        ranks, refused = session.tree.decide(nodes, draws)
        if nodes:
            self._wait_policy.observe_round(len(ranks) - 1, refused)
        if not session.tokens:
            session.first = self._agenda.now
        session.rounds += 1
        session.tokens += len(ranks)
        session.idle_since = self._agenda.now
        if not session.left:
            self._finish(session)
        elif session.drafter is not None:
            self._attachments.committed(session, answering=self._wanted)
            self._say(session.drafter, partial(session.drafter.commit, session, len(ranks)))
        else:
            session.tree.commit(len(ranks))

    def _finish(self, session: SimulatedSession) -> None:
        session.ended = self._agenda.now
        del self._sessions[session]
        self._kv -= session.prompt + session.output
        if session.drafter is not None:
            self._say(session.drafter, partial(session.drafter.remove, session))
        self._ended(self, session)
