"""One run of requests against a server: the times at which each was due, sent and answered.

Times are the event loop's, so a test can let them pass on a virtual clock. Latencies count from the moment a request
was due: a client that could not send in time, or a server that made it wait, must not look fast (coordinated omission).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate

from slipstream.errors import InvalidArgument, SlipstreamError

Schedule = Callable[[int], list[float]]
"""From a number of requests to the seconds, after the run's start, at which each is due; ascending."""


def constant(rate: float) -> Schedule:
    """One request each 1 / `rate` seconds, the first at 0. Raises InvalidArgument for a rate that is not positive."""
    gap_s = _gap_s(rate)
    return lambda count: [index * gap_s for index in range(count)]


def poisson(rate: float, seed: int = 0) -> Schedule:
    """Independent arrivals: gaps are exponential with mean 1 / `rate` seconds. The same seed gives the same times, so
    that both runs of a pair meet the same bursts. Raises InvalidArgument for a rate that is not positive."""
    gap_s = _gap_s(rate)

    def times(count: int) -> list[float]:
        chance = random.Random(seed)
        return list(accumulate(chance.expovariate(1.0 / gap_s) for _ in range(count)))

    return times


def _gap_s(rate: float) -> float:
    if not rate > 0.0:
        raise InvalidArgument("a rate of requests is positive.", reason="BAD_RATE")
    return 1.0 / rate


@dataclass(frozen=True, slots=True)
class Answered:
    """A server's report of one completion. Counts of speculation are 0 where the server sends none."""

    tokens: int
    rounds: int = 0
    rounds_with_drafts: int = 0
    drafted: int = 0
    accepted: int = 0


Arrived = Callable[[], None]
"""To be called whenever output arrives."""
Send = Callable[[int, Arrived], Awaitable[Answered]]
"""Sends the request of this index and reads its whole output. Raises SlipstreamError where it fails."""


@dataclass(slots=True)
class RequestOutcome:
    """One request. Seconds since the run's start."""

    index: int
    due_s: float
    sent_s: float = 0.0
    heard_s: list[float] = field(default_factory=list)
    """Each arrival of output; one may bring several tokens."""
    answered: Answered = Answered(0)
    error: SlipstreamError | None = None

    @property
    def ttft_s(self) -> float | None:
        """None without output."""
        return self.heard_s[0] - self.due_s if self.heard_s else None

    @property
    def e2e_s(self) -> float | None:
        """Until the last output; None without any."""
        return self.heard_s[-1] - self.due_s if self.heard_s else None

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for fewer than two tokens."""
        tokens = self.answered.tokens
        return (self.heard_s[-1] - self.heard_s[0]) / (tokens - 1) if self.heard_s and tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between arrivals of output, as load tools count them: tokens of one arrival add none."""
        return [later - earlier for earlier, later in zip(self.heard_s, self.heard_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: list[RequestOutcome]
    """In the order of the requests."""
    wall_s: float

    @property
    def served(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def tokens_per_s(self) -> float:
        return sum(outcome.answered.tokens for outcome in self.served) / self.wall_s


async def closed_loop(send: Send, count: int, concurrency: int, ended: Callable[[], None] = lambda: None) -> Run:
    """Sends `count` requests, `concurrency` at once; `ended` is called after each. A request is due when it is sent."""
    clock, outcomes = _Clock(), list[RequestOutcome]()

    async def worker() -> None:
        while len(outcomes) < count:
            outcomes.append(outcome := RequestOutcome(len(outcomes), clock.now()))
            await _sent(send, outcome, clock)
            ended()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(worker())
    return Run(outcomes, clock.now())


async def open_loop(send: Send, count: int, schedule: Schedule, ended: Callable[[], None] = lambda: None) -> Run:
    """Sends `count` requests by the schedule, however many are under way; `ended` is called after each."""
    clock = _Clock()
    outcomes = [RequestOutcome(index, due_s) for index, due_s in enumerate(schedule(count))]

    async def one(outcome: RequestOutcome) -> None:
        await _sent(send, outcome, clock)
        ended()

    async with asyncio.TaskGroup() as group:
        for outcome in outcomes:
            await asyncio.sleep(outcome.due_s - clock.now())
            group.create_task(one(outcome))
    return Run(outcomes, clock.now())


class _Clock:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def now(self) -> float:
        """Seconds since the run's start."""
        return self._loop.time() - self._began


async def _sent(send: Send, outcome: RequestOutcome, clock: _Clock) -> None:
    outcome.sent_s = clock.now()
    try:
        outcome.answered = await send(outcome.index, lambda: outcome.heard_s.append(clock.now()))
    except SlipstreamError as error:
        outcome.error = error
