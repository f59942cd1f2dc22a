"""A few verifiers with their drafters and a gateway, simulated step by step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from capacity.drafting import Agenda, DraftSettings, SimulatedDrafter, SimulatedSession
from capacity.guessing import SimulatedTree
from capacity.verifying import SimulatedVerifier, Verifying

Request = tuple[float, int, int]
"""(seconds since the one before, prompt tokens, output tokens)"""


@dataclass(frozen=True, slots=True)
class Cell:
    verifying: Verifying
    drafting: DraftSettings | None = None
    verifiers: int = 1
    drafters: int = 1
    """Ignored without `drafting`."""
    client_s: float = 0.0
    """One way from the client to the verifier, on average: no two messages take equally long, or requests that are sent
    together would share their first step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Observations of a window of `seconds`: the sessions that ended in it, and the workers."""

    seconds: float
    sessions: list[SimulatedSession]
    tokens: int
    """Output tokens of all sessions in the window."""
    steps: int
    """Steps of the verifiers."""
    computed: int
    """Tokens that these took."""
    inside: float
    """Sessions, on average over time."""
    verifiers_busy: float
    drafters_busy: float
    drafters_needed: float
    """Sessions that need each at a time, on average: what drafters are scaled by."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return sum(s.tokens for s in self.sessions) / max(1, sum(s.rounds for s in self.sessions))

    def ttft_s(self, share: float) -> float:
        return _quantile([s.ttft_s for s in self.sessions], share)

    def tpot_s(self, share: float) -> float:
        return _quantile([s.tpot_s for s in self.sessions if s.output > 1], share)


def way_s(average_s: float, draws: random.Random) -> float:
    """Seconds that one message takes."""
    return average_s * draws.uniform(0.5, 1.5)


def _quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")


class Simulation:
    """Sessions go to the least loaded verifier and the least loaded drafter, as in `gateway.routing.router`."""

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        self._cell = cell
        self.agenda = Agenda()
        draws = random.Random(seed)
        self._ways = random.Random(f"{seed} ways")
        self.verifiers = [
            SimulatedVerifier(self.agenda, cell.verifying, draws, self._ended) for _ in range(cell.verifiers)
        ]
        count = cell.drafters if cell.drafting is not None else 0
        most = cell.verifying.max_draft_tokens
        self.drafters = [
            SimulatedDrafter(self.agenda, cell.drafting, most) for _ in range(count) if cell.drafting is not None
        ]
        self._placed = dict.fromkeys(self.verifiers, 0)
        self._paired = dict.fromkeys(self.drafters, 0)
        self._inside: dict[SimulatedSession, None] = {}
        self._done: list[SimulatedSession] = []
        self._next: Iterator[tuple[int, int]] | None = None
        self._area = self._since = 0.0
        self._committed = 0
        """Tokens of the sessions that have ended."""

    def open_arrivals(self, requests: Iterable[Request]) -> None:
        """Requests come when they come."""
        self._arrivals = iter(requests)
        self._come()

    def open_closed_loop(self, sizes: Iterable[tuple[int, int]], at_once: int) -> None:
        """So many sessions of (prompt, output) tokens at once; where one ends the next one begins."""
        self._next = iter(sizes)
        for _, size in zip(range(at_once), self._next, strict=False):
            self._admit(*size)

    def observe(self, until: float, sessions: int | None = None) -> Outcome:
        """Runs until that time, or until so many sessions have ended, and reports what happened since the call."""
        agenda, start = self.agenda, self.agenda.now
        self._done = []
        self._tally()
        self._area = 0.0
        before = self._totals()
        agenda.run(until, lambda: sessions is not None and len(self._done) >= sessions)
        self._tally()
        seconds = max(agenda.now - start, 1e-9)
        tokens, steps, computed, verifiers, drafters, needed = (
            after - earlier for after, earlier in zip(self._totals(), before, strict=True)
        )
        return Outcome(
            seconds,
            self._done,
            int(tokens),
            int(steps),
            int(computed),
            self._area / seconds,
            verifiers / seconds / len(self.verifiers),
            drafters / seconds / max(1, len(self.drafters)),
            needed / seconds / max(1, len(self.drafters)),
        )

    def _come(self, *size: int) -> None:
        if size:
            self._admit(*size)
        request = next(self._arrivals, None)
        if request is not None:
            after, prompt, output = request
            self.agenda.at(self.agenda.now + after, lambda: self._come(prompt, output))

    def _admit(self, prompt: int, output: int) -> None:
        """The gateway's part."""
        self._tally()
        session = SimulatedSession(self.agenda.now, prompt, output, SimulatedTree(self._cell.verifying.acceptance))
        self._inside[session] = None
        if self.drafters:
            session.drafter = min(self.drafters, key=lambda drafter: self._paired[drafter])
            self._paired[session.drafter] += 1
        verifier = min(self.verifiers, key=lambda verifier: (bool(verifier.waiting), self._placed[verifier]))
        self._placed[verifier] += 1
        self.agenda.at(self.agenda.now + way_s(self._cell.client_s, self._ways), lambda: verifier.add(session))

    def _ended(self, verifier: SimulatedVerifier, session: SimulatedSession) -> None:
        self._tally()
        del self._inside[session]
        self._committed += session.tokens
        session.first += self._cell.client_s
        session.ended += self._cell.client_s
        self._done.append(session)
        self._placed[verifier] -= 1
        if session.drafter is not None:
            self._paired[session.drafter] -= 1
        if self._next is not None and (size := next(self._next, None)) is not None:
            self._admit(*size)

    def _tally(self) -> None:
        self._area += len(self._inside) * (self.agenda.now - self._since)
        self._since = self.agenda.now

    def _totals(self) -> tuple[float, ...]:
        """Since the start: tokens, steps and computed tokens, how long both roles were busy, and drafters needed."""
        return (
            self._committed + sum(session.tokens for session in self._inside),
            sum(verifier.steps for verifier in self.verifiers),
            sum(verifier.computed for verifier in self.verifiers),
            sum(verifier.busy_s for verifier in self.verifiers),
            sum(drafter.busy_s for drafter in self.drafters),
            sum(drafter.needed_s for drafter in self.drafters),
        )
