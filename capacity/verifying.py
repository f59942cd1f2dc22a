"""A simulated verifier: batched steps over its sessions, planned by the very rules of the real one.

Budget, waiting, price, promise, pace and prefill are `verifier_svc`'s own functions; what is written again here in
small is what `verifier_svc.planner` and `verifier_svc.scheduler` put around them. Acceptance is known, so there is no
calibration.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from capacity.agenda import Agenda
from capacity.cost import Cost, over
from capacity.drafting import Drafter
from capacity.guessing import Acceptance, Guess, Tree
from capacity.session import Session
from verifier_svc.average import Average
from verifier_svc.budget import Offer, allot
from verifier_svc.pace import Delays, Pace, place
from verifier_svc.prefill import chunks
from verifier_svc.price import Price
from verifier_svc.promise import Hope, Promise
from verifier_svc.waiting import Awaited, wait_s

FIRST_GUESS, TIMER_S, LONGEST_WAIT_STEPS = 0.6, 0.001, 2.0
"""See `verifier_svc.planner`."""
LEAST_PATH = 0.02
"""`VERIFIER_MIN_PATH_PROBABILITY`."""


@dataclass(frozen=True, slots=True)
class Verifying:
    """The settings of a verifier."""

    cost: Cost
    acceptance: Acceptance
    host_s: float = 0.0
    """Seconds between two passes in which the device waits: planning, committing, talking."""
    host_session_s: float = 0.0
    """What each session in the step adds to that."""
    sessions: int = 1024
    kv_tokens: int = 1 << 40
    max_draft_tokens: int = 8
    step_tokens: int = 512
    prefill_tokens: int = 256
    max_wait_s: float = 0.25
    draft: Cost | None = None
    """Co-located speculation: what a pass of the draft model costs on this device, between the target's passes."""
    expand: int = 4


@dataclass(frozen=True, slots=True)
class Step:
    decoding: list[Session]
    chosen: list[list[Guess]]
    """Candidates of each of them."""
    paths: list[list[float]]
    """Path probabilities of each one's best candidates, of which the first are chosen."""
    reading: dict[Session, int]
    tokens: float
    """Expected to be committed."""
    seconds: float

    @property
    def size(self) -> int:
        return len(self.decoding) + sum(map(len, self.chosen)) + sum(self.reading.values())


class Verifier:
    def __init__(
        self, agenda: Agenda, settings: Verifying, random: random.Random, ended: Callable[[Verifier, Session], None]
    ) -> None:
        self._agenda = agenda
        self.settings = settings
        self._random = random
        self._ended = ended
        self.sessions: dict[Session, None] = {}
        self.waiting: list[Session] = []
        """For room."""
        self._kv = 0
        self._count = 0
        self._busy = False
        self._waiting_since: float | None = None
        self._plans = 0
        self._paces: dict[Drafter, Pace] = {}
        self._price = Price(LEAST_PATH)
        self._promise = Promise[Session]()
        self._acceptance = Average(FIRST_GUESS)
        self._tokens, self._seconds = Average(), Average()
        self._serial: dict[int, int] = {}
        self.busy_s = 0.0
        self.steps = self.computed = 0
        """Steps taken; tokens computed in them."""

    def add(self, session: Session) -> None:
        self._count += 1
        session.rank = self._count
        self.waiting.append(session)
        self._enter()
        self._wake()

    def arrived(self, sessions: list[Session]) -> None:
        """Candidates of these came."""
        now = self._agenda.now
        for session in sessions:
            if session.drafter is not None and session.version >= 0:
                session.delays.came(now - session.since)
                session.fresh = False
                session.version += 1
                self._await(session)
        self._wake()

    def _enter(self) -> None:
        """As many as fit with all they will hold. The real one lets more in and takes KV back when it must."""
        while self.waiting and len(self.sessions) < self.settings.sessions:
            session = self.waiting[0]
            size = session.prompt + session.output
            if self._kv + size > self.settings.kv_tokens and self.sessions:
                break
            self._kv += size
            self.sessions[self.waiting.pop(0)] = None
            session.idle_since = self._agenda.now
            if session.drafter is not None:
                session.since = self._agenda.now
                session.delays = self._pace(session.drafter).first
                self._later(session.drafter, lambda session=session: self._open(session))  # type: ignore[misc]

    def _open(self, session: Session) -> None:
        assert session.drafter is not None
        if session in self.sessions:
            session.drafter.add(session, self._price.threshold, self)

    def _later(self, drafter: Drafter, event: Callable[[], None]) -> None:
        """What is said to a drafter arrives."""
        self._agenda.at(self._agenda.now + drafter.delay_s, event)

    def _wake(self) -> None:
        if self._busy:
            return
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
            plan = self._plans
            self._agenda.at(now + pause, lambda: self._wake() if plan == self._plans else None)
            return
        self._waiting_since = None
        self._start(step, waited)

    # Planning, as `verifier_svc.planner`.

    def _plan(self) -> Step:
        limits = self.settings
        decoding = sorted((s for s in self.sessions if not s.pending), key=lambda s: s.idle_since)
        prefilling = [session for session in self.sessions if session.pending]
        reserved = 0
        if decoding:
            most = min(limits.prefill_tokens, limits.step_tokens // 2)
            reserved = min(most, sum(session.pending for session in prefilling))
        decoding = decoding[: limits.step_tokens - reserved]
        room = limits.step_tokens - reserved - len(decoding)
        drafted = self._draft(decoding)
        offers: list[Offer] = []
        offered: list[list[Guess]] = []
        for session in decoding:
            limit = self._limit(session)
            nodes, likely = session.tree.offer(self._agenda.now, min(limit, room)) if limit else ([], [])
            offers.append(Offer(likely, limit))
            offered.append(nodes)
        seconds = over(limits.cost, max(1, len(decoding)))
        allotment = allot(offers, seconds, room, len(decoding) + reserved)
        chosen = [nodes[:count] for nodes, count in zip(offered, allotment.counts, strict=True)]
        paths = [list(offer.probabilities) for offer in offers]
        room = limits.step_tokens - sum(1 + len(nodes) for nodes in chosen)
        room = min(room, limits.prefill_tokens) if decoding else room
        reading = chunks(prefilling, room)
        return Step(decoding, chosen, paths, reading, allotment.tokens, allotment.seconds + drafted)

    def _limit(self, session: Session) -> int:
        if session.drafter is None and self.settings.draft is None:
            return 0
        return max(0, min(self.settings.max_draft_tokens, session.left - 1))

    def _pause(self, step: Step, waited: float) -> float:
        if step.reading or not self._paces:
            return 0.0
        now, rate = self._agenda.now, self._rate(step)
        hopes = {
            session: self._hope(session, nodes, paths)
            for session, nodes, paths in zip(step.decoding, step.chosen, step.paths, strict=True)
            if session.drafter is not None and self._limit(session)
        }
        self._promise.look(hopes)
        most = min(self.settings.max_wait_s, LONGEST_WAIT_STEPS * step.seconds) - waited
        groups: dict[tuple[int, int], tuple[Delays, float, list[float]]] = {}
        for session, hope in hopes.items():
            gain = hope.gain * self._promise.ratio - hope.cost
            if gain > 0.0 and self._price.threshold < 1.0:
                passed = now - session.since
                group = groups.setdefault((id(session.delays), place(passed)), (session.delays, passed, []))
                group[2].append(gain)
        awaited = [
            Awaited(sum(gains), delays.expected(passed, most), len(gains)) for delays, passed, gains in groups.values()
        ]
        pause = wait_s(rate, awaited, most, TIMER_S)
        if pause > 0.0:
            self._promise.wait(hopes)
        return pause

    def _hope(self, session: Session, nodes: list[Guess], paths: list[float]) -> Hope:
        inner = {id(node.parent) for node in nodes}
        leaves = [path for node, path in zip(nodes, paths, strict=False) if id(node) not in inner]
        gain, cost = max(leaves, default=1.0) * (self._acceptance.value or 0.0), self._price.average
        if len(nodes) >= self._limit(session) or len(paths) > len(nodes):
            cost = max(cost, paths[min(len(nodes), len(paths) - 1)])
        return Hope(session.version, sum(paths[: len(nodes)]), gain, cost)

    def _rate(self, step: Step) -> float:
        lately = (self._tokens.value or step.tokens) / max(self._seconds.value or step.seconds, 1e-9)
        sessions = len(step.decoding)
        return max(lately, sessions / max(self.settings.cost(sessions, sessions), 1e-9))

    # Running and committing, as `verifier_svc.scheduler`.

    def _start(self, step: Step, waited: float) -> None:
        members = len(step.decoding) + len(step.reading)
        seconds = self.settings.cost(step.size, members)
        drafting = self._drafting_s(len(step.decoding))
        self.busy_s += seconds + drafting
        self.steps += 1
        self.computed += step.size
        self._busy = True
        host_s = self.settings.host_s + self.settings.host_session_s * members
        whole = drafting + seconds + host_s
        self._agenda.at(self._agenda.now + whole, lambda: self._end(step, seconds, whole - seconds + waited))

    def _end(self, step: Step, seconds: float, waited: float) -> None:
        self._busy = False
        if not step.reading:
            self._learn(step, seconds, waited)
        for session, size in step.reading.items():
            session.pending -= size
        first = [session for session in step.reading if not session.pending]
        for session, nodes in zip([*step.decoding, *first], [*step.chosen, *([] for _ in first)], strict=True):
            self._commit(session, nodes)
        self._enter()
        self._wake()

    def _learn(self, step: Step, seconds: float, waited: float) -> None:
        sessions = len(step.decoding)
        self._tokens.add(step.tokens)
        self._seconds.add(seconds + waited)
        if self._price.observe(self._rate(step), lambda n: self.settings.cost(n, sessions), step.size):
            for session in self.sessions:
                if session.drafter is not None:
                    self._later(
                        session.drafter,
                        lambda session=session, least=self._price.threshold: session.drafter.demand(session, least),  # type: ignore[misc]
                    )

    def _commit(self, session: Session, nodes: list[Guess]) -> None:
        now = self._agenda.now
        answering = session.drafter is not None and self._price.threshold < 1.0
        draws = [self._random.random() for _ in range(min(session.left, len(nodes) + 1))]
        ranks = session.tree.decide(nodes, draws)
        session.drafted += len(nodes)
        session.rounds += 1
        if nodes:
            accepted = len(ranks) - 1
            self._acceptance.add(accepted / (accepted + (nodes[-1].depth > 0 and accepted < len(nodes))))
        if not session.tokens:
            session.first = now
        session.tokens += len(ranks)
        session.idle_since = now
        if not session.left:
            self._finish(session)
        elif (drafter := session.drafter) is not None:
            if answering:
                session.delays.missed(now - session.since)
            session.fresh = session.fresh or not session.tree.holds(1, now)
            self._await(session)
            self._later(drafter, lambda: drafter.commit(session, len(ranks)))
        else:
            session.tree.commit(len(ranks))

    def _await(self, session: Session) -> None:
        assert session.drafter is not None
        pace = self._pace(session.drafter)
        session.since = self._agenda.now
        if session.fresh:
            session.delays = pace.first
        else:
            enough = session.tree.holds(self.settings.max_draft_tokens, self._agenda.now)
            session.delays = pace.enough if enough else pace.few

    def _pace(self, drafter: Drafter) -> Pace:
        if drafter not in self._paces:
            self._paces[drafter] = Pace()
        return self._paces[drafter]

    def _finish(self, session: Session) -> None:
        session.ended = self._agenda.now
        session.version = -1
        del self.sessions[session]
        self._kv -= session.prompt + session.output
        if (drafter := session.drafter) is not None:
            self._later(drafter, lambda: drafter.remove(session))
        self._ended(self, session)

    # Co-located speculation: passes of the draft model between the target's.

    def _draft(self, decoding: list[Session]) -> float:
        """Grows the trees of those that decode; the seconds it takes."""
        if self.settings.draft is None or not decoding or self._busy:
            return 0.0
        for _ in range(self._passes(len(decoding))):
            for session in decoding:
                for start in session.tree.frontier(self.settings.expand, LEAST_PATH, 128):
                    start.expanded = True
                    session.tree.grow(start)
        for session in decoding:
            session.tree.tell(LEAST_PATH, 128, self._agenda.now)
        return self._drafting_s(len(decoding))

    def _drafting_s(self, sessions: int) -> float:
        if self.settings.draft is None or not sessions:
            return 0.0
        passes = self._passes(sessions)
        return sum(self.settings.draft(sessions * (1 + self.settings.expand * k), sessions) for k in range(passes))

    def _passes(self, sessions: int) -> int:
        """Of the draft model before each step: as many as give the most tokens a second at this number of sessions."""
        best = self._serial.get(sessions)
        if best is None:
            best = self._serial[sessions] = max(range(self.settings.max_draft_tokens + 1), key=self._goodput(sessions))
        return best

    def _goodput(self, sessions: int) -> Callable[[int], float]:
        """Tokens a second by the number of draft passes, from a tree that begins with nothing."""
        tree, settings = Tree(self.settings.acceptance), self.settings
        assert settings.draft is not None
        rates: list[float] = []
        drafted = 0.0
        for passes in range(settings.max_draft_tokens + 1):
            tree.tell(LEAST_PATH, 128, 0.0)
            offer = Offer(tree.offer(0.0, settings.max_draft_tokens)[1], settings.max_draft_tokens)
            room = settings.step_tokens - sessions
            step = allot([offer] * sessions, over(settings.cost, sessions), room)
            host_s = settings.host_s + settings.host_session_s * sessions
            rates.append(step.tokens / (step.seconds + drafted + host_s))
            drafted += settings.draft(sessions * (1 + settings.expand * passes), sessions)
            for start in tree.frontier(settings.expand, LEAST_PATH, 128):
                start.expanded = True
                tree.grow(start)
        return lambda passes: rates[passes]
