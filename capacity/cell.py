"""A few verifiers with their drafters and a gateway, on virtual time: the workers' own code, step by step."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from capacity.clock import LoneLoop
from capacity.settings import DraftSettings, Verifying
from capacity.simulated_workers import SimulatedSession, SimulatedVerifier, simulated_drafter
from capacity.workers import Drafter
from slipstream.errors import FailedPrecondition
from slipstream.v1 import types_pb2

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
    """A cell that runs until the block ends. As in `gateway.routing.verifier_choice`, sessions go to the least loaded
    verifier and the least loaded drafter; those beyond a verifier's bound wait."""

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        self._cell = cell
        self._ways = random.Random(f"{seed} ways")
        self._draws = random.Random(seed)
        self._inside: dict[SimulatedSession, None] = {}
        self._done: list[SimulatedSession] = []
        self._arrivals: Iterator[Request] = iter(())
        self._more = False
        """Whether more requests come."""
        self._next: Iterator[tuple[int, int]] = iter(())
        self._wanted: int | None = None
        self._area = self._since = 0.0
        self._committed = 0
        """Tokens of the sessions that have ended."""
        self._failed: FailedPrecondition | None = None

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=LoneLoop)
        self._loop: Any = self._runner.get_loop()
        self._runner.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    @property
    def now(self) -> float:
        seconds: float = self._loop.now
        return seconds

    def open_arrivals(self, requests: Iterable[Request]) -> None:
        """Requests come when they come."""
        self._arrivals, self._more = iter(requests), True
        self._come()

    def open_closed_loop(self, sizes: Iterable[tuple[int, int]], at_once: int) -> None:
        """So many sessions of (prompt, output) tokens at once; where one ends the next one begins."""
        self._next = iter(sizes)
        for _, size in zip(range(at_once), self._next, strict=False):
            self._admit(*size)

    def open_crowd(self, outputs: Iterable[int]) -> None:
        """Sessions that are there already, with so many tokens to go."""
        for output in outputs:
            self._admit(1, output, observed=False)

    def observe(self, until: float = math.inf, sessions: int | None = None) -> Outcome:
        """Runs until that time, until so many sessions have ended, or until none is left and none comes, and reports
        what happened since the call. Raises FailedPrecondition for a session that a verifier cannot serve."""
        start, before = self.now, self._totals()
        self._done, self._wanted = [], sessions
        self._tally()
        self._area = 0.0
        self._runner.run(self._until(until))
        if self._failed is not None:
            raise self._failed
        self._tally()
        seconds = max(self.now - start, 1e-9)
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
            verifiers / seconds / len(self._verifiers),
            drafters / seconds / max(1, len(self._drafters)),
            needed / seconds / max(1, len(self._drafters)),
        )

    async def _start(self) -> None:
        cell, drafting = self._cell, self._cell.drafting
        self._enough = asyncio.Event()
        self._verifiers = [SimulatedVerifier(self, cell.verifying, self._draws) for _ in range(cell.verifiers)]
        self._drafters: list[Drafter] = []
        if drafting is not None:
            self._drafters = [simulated_drafter(drafting, cell.verifying.acceptance) for _ in range(cell.drafters)]
            for verifier in self._verifiers:
                verifier.connect(self._drafters, drafting.delay_s)
        self._paired = [0] * len(self._drafters)

    async def _until(self, until: float) -> None:
        self._enough.clear()
        self._look()
        try:
            async with asyncio.timeout_at(until if until < math.inf else None):
                await self._enough.wait()
        except TimeoutError:
            return

    def _look(self) -> None:
        enough = self._wanted is not None and len(self._done) >= self._wanted
        if enough or self._failed or not (self._more or self._inside):
            self._enough.set()

    def _come(self, *size: int) -> None:
        if size:
            self._admit(*size)
        request = next(self._arrivals, None)
        self._more = request is not None
        if request is not None:
            after, prompt, output = request
            self._loop.call_later(after, self._come, prompt, output)

    def _admit(self, prompt: int, output: int, *, observed: bool = True) -> None:
        """The gateway's part."""
        self._tally()
        session = SimulatedSession(self.now, prompt, output, observed)
        self._inside[session] = None
        if self._drafters:
            session.drafter = min(range(len(self._drafters)), key=self._paired.__getitem__)
            self._paired[session.drafter] += 1
        verifier = min(self._verifiers, key=lambda verifier: (verifier.full, verifier.placed))
        verifier.placed += 1
        self._loop.call_later(way_s(self._cell.client_s, self._ways), verifier.add, session)

    def ended(self, session: SimulatedSession) -> None:
        """Called by its verifier."""
        self._tally()
        del self._inside[session]
        self._committed += session.tokens
        session.first += self._cell.client_s
        session.ended = self.now + self._cell.client_s
        if session.observed:
            self._done.append(session)
        if session.drafter is not None:
            self._paired[session.drafter] -= 1
        if (size := next(self._next, None)) is not None:
            self._admit(*size)
        self._look()

    def refused(self, failure: types_pb2.Failure) -> None:
        """A verifier cannot serve a session."""
        self._failed = FailedPrecondition(f"a verifier cannot serve this traffic: {failure.message}")
        self._look()

    def _tally(self) -> None:
        self._area += len(self._inside) * (self.now - self._since)
        self._since = self.now

    def _totals(self) -> tuple[float, ...]:
        """Since the start: tokens, steps and computed tokens, how long both roles were busy, and drafters needed."""
        return (
            self._committed + sum(session.tokens for session in self._inside),
            sum(verifier.worker.scheduler.steps for verifier in self._verifiers),
            sum(verifier.executor.computed for verifier in self._verifiers),
            sum(verifier.executor.busy_s for verifier in self._verifiers),
            sum(drafter.stats.busy_s for drafter in self._drafters),
            sum(drafter.stats.needed_s for drafter in self._drafters),
        )
