"""The drafting loop: keep every session's chain ahead of its verifier, many sessions in each forward pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from drafter_svc.proposers import Guess, Proposer, Turn
from drafter_svc.session import Session
from slipstream.engine.thread import ModelThread
from slipstream.errors import Internal, SlipstreamError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subscriber:
    """Whom a session's guesses go to. Plain functions: the loop waits for nobody."""

    session: Session
    candidate: Callable[[Guess, int], None]
    """A new node and its number."""
    failed: Callable[[SlipstreamError], None]


class Scheduler:
    """`run` drafts until cancelled; `step_tokens` bounds one forward pass."""

    def __init__(self, proposer: Proposer, thread: ModelThread, step_tokens: int) -> None:
        self._proposer = proposer
        self._thread = thread
        self._step_tokens = step_tokens
        self._subscribers: dict[int, Subscriber] = {}
        self._closing: list[Session] = []
        self._work = asyncio.Event()
        self.steps = 0

    def __len__(self) -> int:
        return len(self._subscribers)

    def add(self, subscriber: Subscriber) -> None:
        self._subscribers[id(subscriber.session)] = subscriber
        self.wake()

    def remove(self, session: Session) -> None:
        session.closed = True
        if self._subscribers.pop(id(session), None) is not None:
            self._closing.append(session)
            self.wake()

    def wake(self) -> None:
        """A session changed: there may be something to draft."""
        self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            turns = self._turns()
            closing, self._closing = self._closing, []
            if not turns and not closing:
                self._work.clear()
                continue
            answers = await self._thread.run(self._step, turns, closing)
            self.steps += 1
            for turn, answer in zip(turns, answers, strict=True):
                self._deliver(turn, answer)

    def _turns(self) -> list[Turn]:
        """The sessions of the next step, those with the fewest guesses ahead first."""
        wanting = [s.session for s in self._subscribers.values() if s.session.wants]
        wanting.sort(key=lambda session: session.drafted)
        turns: list[Turn] = []
        room = self._step_tokens
        for session in wanting:
            if room <= 0:
                break
            start, end = session.computed, len(session.tokens)
            stop = min(end, start + room)
            room -= stop - start
            turns.append(Turn(session, session.generation, start, session.tokens[start:stop], stop == end))
            # True once the step has ended, and no other step begins before: a commit meanwhile may only lower it.
            session.computed = stop
        return turns

    def _step(self, turns: list[Turn], closing: list[Session]) -> list[Guess | SlipstreamError | None]:
        """On the model's thread."""
        for session in closing:
            self._proposer.close(session)
        try:
            return self._proposer.grow(turns) if turns else []
        except Exception as error:
            log.error("a drafting step failed", exc_info=error)
            return [Internal("the drafter failed; open the session again.") for _ in turns]

    def _deliver(self, turn: Turn, answer: Guess | SlipstreamError | None) -> None:
        session = turn.session
        subscriber = self._subscribers.get(id(session))
        if subscriber is None or answer is None:
            return
        if isinstance(answer, SlipstreamError):
            self.remove(session)
            subscriber.failed(answer)
        elif turn.generation == session.generation:
            subscriber.candidate(answer, session.extend(answer.token, answer.log_prob))
