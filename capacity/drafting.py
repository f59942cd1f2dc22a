"""A simulated drafter: one pass after the other over the trees of its sessions, as `slipstream.proposers.drafting`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from capacity.cost import Cost
from capacity.guessing import SimulatedGuess, SimulatedTree
from slipstream.proposers.drafting.shares import PROMPTS
from slipstream.proposers.drafting.step import PASS_NODES, ROUND
from verifier_svc.sources.flow_control import AHEAD
from verifier_svc.wait_policy.arrival_times import DelayDistribution
from verifier_svc.wait_policy.draft_threshold import PAUSE
from verifier_svc.wait_policy.session_drafting import SessionDrafting


class Agenda:
    """Events in order of time; those of one moment in the order in which they were put down."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, event))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """To that time, or until `done` after an event."""
        while self._events and self._events[0][0] <= until and not done():
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass(slots=True, eq=False)
class SimulatedSession:
    arrived: float
    prompt: int
    output: int
    tree: SimulatedTree
    drafter: SimulatedDrafter | None = None
    rank: tuple[int, int] = (0, 0)
    """Priority, which is everybody's, and order of arrival at its verifier."""
    pending: int = 0
    """Tokens of the prompt that the verifier has not read."""
    reading: int = 0
    """Tokens that its drafter has not read, new committed ones included; every pass reads the last token."""
    tokens: int = 0
    """Output so far."""
    first: float = math.nan
    """When the first token came."""
    ended: float = math.nan
    idle_since: float = 0.0
    rounds: int = 0
    version: int = 0
    """Version of the candidates that have arrived."""
    since: float = 0.0
    """When candidates began to be awaited (`verifier_svc.sources.source`)."""
    fresh: bool = True
    delays: DelayDistribution = field(default_factory=DelayDistribution)
    drafting_state: SessionDrafting = field(default_factory=SessionDrafting)
    """Whether drafting pays for it."""

    def __post_init__(self) -> None:
        self.pending = self.reading = self.prompt

    @property
    def left(self) -> int:
        return self.output - self.tokens

    @property
    def ttft_s(self) -> float:
        return self.first - self.arrived

    @property
    def tpot_s(self) -> float:
        """Seconds of each token after the first one; NaN where there is one only."""
        return (self.ended - self.first) / (self.output - 1) if self.output > 1 else math.nan


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The settings of a drafter."""

    cost: Cost
    host_s: float = 0.0
    """Seconds between two passes in which the device waits."""
    host_session_s: float = 0.0
    """Further seconds for each session in the pass."""
    delay_s: float = 0.0
    """One way to the verifier."""
    max_nodes: int = 128
    expand: int = 4
    step_tokens: int = 512


class CandidateListener(Protocol):
    """A verifier."""

    def arrived(self, sessions: list[SimulatedSession]) -> None: ...


class SimulatedDrafter:
    def __init__(self, agenda: Agenda, settings: DraftSettings, max_draft_tokens: int) -> None:
        self._agenda = agenda
        self._settings = settings
        self._most = min(settings.max_nodes, AHEAD * max_draft_tokens)
        self.sessions: dict[SimulatedSession, None] = {}
        self._listeners: dict[SimulatedSession, CandidateListener] = {}
        self._busy = self._awake = False
        self.busy_s = self.needed_s = 0.0
        """In passes; and of each session in them by the chance that its text needs the guess
        (`drafter_svc.metrics_source`)."""
        self.passes = 0

    @property
    def delay_s(self) -> float:
        return self._settings.delay_s

    def add(self, session: SimulatedSession, threshold: float, listener: CandidateListener) -> None:
        session.tree.demand(threshold)
        self.sessions[session] = None
        self._listeners[session] = listener
        self.wake()

    def remove(self, session: SimulatedSession) -> None:
        self.sessions.pop(session, None)
        self._listeners.pop(session, None)

    def demand(self, session: SimulatedSession, threshold: float) -> None:
        if session in self.sessions:
            session.tree.demand(threshold)
            self.wake()

    def commit(self, session: SimulatedSession, count: int) -> None:
        """The next `count` committed tokens are known here."""
        if session in self.sessions:
            session.tree.commit(count)
            session.reading += count
            self._send([session])
            self.wake()

    def wake(self) -> None:
        """There may be something to guess, when all that happens at this moment has happened."""
        if not self._busy and not self._awake:
            self._awake = True
            self._agenda.at(self._agenda.now, self._start)

    def _start(self) -> None:
        self._awake = False
        turns = self._turns()
        if turns:
            tokens = sum(size for _, size, _ in turns)
            seconds = self._settings.cost(tokens, len(turns))
            self._busy = True
            self.busy_s += seconds
            self.needed_s += seconds * sum(starts[0].path if starts else 1.0 for _, _, starts in turns)
            self.passes += 1
            host_s = self._settings.host_s + self._settings.host_session_s * len(turns)
            self._agenda.at(self._agenda.now + seconds + host_s, lambda: self._end(turns))

    def _end(self, turns: list[tuple[SimulatedSession, int, list[SimulatedGuess]]]) -> None:
        self._busy = False
        guessed = [(session, starts) for session, _, starts in turns if session in self.sessions]
        for session, starts in guessed:
            for start in starts:
                session.tree.grow(start)
        self._send([session for session, starts in guessed if starts])
        self.wake()

    def _turns(self) -> list[tuple[SimulatedSession, int, list[SimulatedGuess]]]:
        """(session, tokens, places to guess on) of the next pass: those that decode, the fewest guesses first, then
        prompts, each with an equal share of what is left."""
        frontiers = self._frontiers()
        reading = sum(session.reading > ROUND for session, _ in frontiers)
        kept = self._settings.step_tokens // PROMPTS if reading else 0
        room = self._settings.step_tokens - kept
        turns: list[tuple[SimulatedSession, int, list[SimulatedGuess]]] = []
        for session, starts in frontiers:
            prompt = session.reading > ROUND
            if prompt:
                room, kept = room + kept, 0
            share = min(room, max(ROUND, room // max(reading, 1))) if prompt else room
            if share <= 0:
                session.tree.shelve(starts)
                continue
            reading -= prompt
            turns.append(self._turn(session, starts, share))
            room -= turns[-1][1]
        return turns

    def _turn(
        self, session: SimulatedSession, starts: list[SimulatedGuess], share: int
    ) -> tuple[SimulatedSession, int, list[SimulatedGuess]]:
        size = min(session.reading, share)
        if size < session.reading:
            session.reading -= size
            session.tree.shelve(starts)
            return session, size, []
        session.reading = 1  # the last token is computed again with each tree
        for start in starts:
            start.expanded = True
        return session, size + _above(session.tree.root, starts), starts

    def _frontiers(self) -> list[tuple[SimulatedSession, list[SimulatedGuess]]]:
        """Each session's likeliest node to expand, and the likeliest of all others that a pass has room for."""
        order = sorted(self.sessions, key=lambda session: (session.reading > ROUND, session.tree.size))
        found: list[tuple[SimulatedSession, list[SimulatedGuess]]] = []
        for session in order:
            starts = session.tree.frontier(self._settings.expand, self._allowed(session))
            if starts:
                found.append((session, starts))
        others = sorted(((-place.path, number) for number, (_, starts) in enumerate(found) for place in starts[1:]))
        room = max(0, PASS_NODES - len(found))
        if len(others) > room:
            counts = [1] * len(found)
            for _, number in others[:room]:
                counts[number] += 1
            for (session, starts), count in zip(found, counts, strict=True):
                session.tree.shelve(starts[count:])
                del starts[count:]
        return found

    def _allowed(self, session: SimulatedSession) -> int:
        """Nodes that may be sent."""
        return self._most if session.tree.least < PAUSE else 0

    def _send(self, sessions: list[SimulatedSession]) -> None:
        arrives = self._agenda.now + self._settings.delay_s
        richer = [session for session in sessions if session.tree.mark_sent(self._allowed(session), arrives)]
        if richer:
            self._agenda.at(arrives, lambda: self._arrive(richer))

    def _arrive(self, sessions: list[SimulatedSession]) -> None:
        of_each: dict[CandidateListener, list[SimulatedSession]] = {}
        for session in sessions:
            if listener := self._listeners.get(session):
                of_each.setdefault(listener, []).append(session)
        for listener, some in of_each.items():
            listener.arrived(some)


def _above(root: SimulatedGuess, starts: list[SimulatedGuess]) -> int:
    """Guesses that a pass over these places computes: they and all above them."""
    seen: set[int] = set()
    for start in starts:
        node: SimulatedGuess | None = start
        while node is not None and node is not root and id(node) not in seen:
            seen.add(id(node))
            node = node.parent
    return len(seen)
