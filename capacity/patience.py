"""When a simulated verifier waits for candidates, and what drafters are told: that part of `verifier_svc.planner`."""

from __future__ import annotations

from capacity.agenda import Agenda
from capacity.drafting import PAUSE, Drafter
from capacity.guessing import Guess
from capacity.session import Session
from capacity.step import Step, Verifying
from verifier_svc.average import Average
from verifier_svc.pace import Delays, Pace, place
from verifier_svc.price import Price
from verifier_svc.promise import Hope, Promise
from verifier_svc.waiting import Awaited, wait_s

FIRST_GUESS, TIMER_S, LONGEST_WAIT_STEPS = 0.6, 0.001, 2.0
"""See `verifier_svc.planner`."""
LEAST_PATH = 0.02
"""`VERIFIER_MIN_PATH_PROBABILITY`."""


class Patience:
    """Of one verifier."""

    def __init__(self, agenda: Agenda, settings: Verifying) -> None:
        self._agenda = agenda
        self._settings = settings
        self._paces: dict[Drafter, Pace] = {}
        self._price = Price(LEAST_PATH)
        self._promise = Promise[Session]()
        self._acceptance = Average(FIRST_GUESS)
        self._tokens, self._seconds = Average(), Average()

    @property
    def threshold(self) -> float:
        """Path probability that candidates must have."""
        return self._price.threshold

    # What happens to a session that has a drafter.

    def opened(self, session: Session) -> None:
        self._await(session)

    def arrived(self, session: Session) -> None:
        """Candidates came."""
        session.delays.came(self._agenda.now - session.since)
        session.fresh = False
        session.version += 1
        self._await(session)

    def committed(self, session: Session) -> None:
        """Candidates on a new root are awaited."""
        if self.threshold < PAUSE:
            session.delays.missed(self._agenda.now - session.since)
        session.fresh = session.fresh or not session.tree.holds(1, self._agenda.now)
        self._await(session)

    def judged(self, accepted: int, refused: bool) -> None:
        """So many of a session's candidates were accepted, and whether one was refused behind them."""
        self._acceptance.add(accepted / max(1, accepted + refused))

    # What happens to a step.

    def timed(self, step: Step, seconds: float) -> bool:
        """It took so long, waiting included; whether the threshold changed."""
        sessions = len(step.decoding)
        self._tokens.add(step.tokens)
        self._seconds.add(seconds)
        return self._price.observe(self._rate(step), lambda size: self._settings.cost(size, sessions), step.size)

    def pause(self, step: Step, waited: float) -> float:
        """Seconds worth waiting before it, having waited so long already."""
        if step.reading or not self._paces:
            return 0.0
        hopes = {
            session: self._hope(session, nodes, paths)
            for session, nodes, paths in zip(step.decoding, step.chosen, step.paths, strict=True)
            if session.drafter is not None and self._settings.limit(session)
        }
        self._promise.look(hopes)
        most = min(self._settings.max_wait_s, LONGEST_WAIT_STEPS * step.seconds) - waited
        pause = wait_s(self._rate(step), self._awaited(hopes, most), most, TIMER_S)
        if pause > 0.0:
            self._promise.wait(hopes)
        return pause

    def _awaited(self, hopes: dict[Session, Hope], most: float) -> list[Awaited]:
        groups: dict[tuple[int, int], tuple[Delays, float, list[float]]] = {}
        for session, hope in hopes.items():
            gain = hope.gain * self._promise.ratio - hope.cost
            if gain > 0.0 and self.threshold < PAUSE:
                passed = self._agenda.now - session.since
                group = groups.setdefault((id(session.delays), place(passed)), (session.delays, passed, []))
                group[2].append(gain)
        return [
            Awaited(sum(gains), delays.expected(passed, most), len(gains)) for delays, passed, gains in groups.values()
        ]

    def _hope(self, session: Session, nodes: list[Guess], paths: list[float]) -> Hope:
        inner = {id(node.parent) for node in nodes}
        leaves = [path for node, path in zip(nodes, paths, strict=False) if id(node) not in inner]
        gain, cost = max(leaves, default=1.0) * (self._acceptance.value or 0.0), self._price.average
        if len(nodes) >= self._settings.limit(session) or len(paths) > len(nodes):
            cost = max(cost, paths[min(len(nodes), len(paths) - 1)])
        return Hope(session.version, sum(paths[: len(nodes)]), gain, cost)

    def _rate(self, step: Step) -> float:
        lately = (self._tokens.value or step.tokens) / max(self._seconds.value or step.seconds, 1e-9)
        sessions = len(step.decoding)
        return max(lately, sessions / max(self._settings.cost(sessions, sessions), 1e-9))

    def _await(self, session: Session) -> None:
        assert session.drafter is not None
        if session.drafter not in self._paces:
            self._paces[session.drafter] = Pace()
        pace = self._paces[session.drafter]
        session.since = self._agenda.now
        if session.fresh:
            session.delays = pace.first
        else:
            enough = session.tree.holds(self._settings.max_draft_tokens, self._agenda.now)
            session.delays = pace.enough if enough else pace.few
