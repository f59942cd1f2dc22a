"""The verifier's loop: plan a step over all sessions, run it, commit what it decided. It never waits for the network
longer than waiting pays, and never for the gateway at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from slipstream import wire
from slipstream.engine.engine import Engine
from slipstream.engine.thread import ModelThread
from slipstream.errors import Internal, InvalidArgument, SlipstreamError
from slipstream.v1 import verifier_pb2
from verifier_svc.acceptance.verdict import Verdict
from verifier_svc.drafters import Drafters
from verifier_svc.planner import Plan, Planner
from verifier_svc.session import Rewind, Session
from verifier_svc.step import Outcome, Turn, perform

log = logging.getLogger(__name__)


class Scheduler:
    """Sessions join and leave between steps."""

    def __init__(
        self,
        engine: Engine,
        thread: ModelThread,
        drafters: Drafters,
        planner: Planner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._drafters = drafters
        self._planner = planner
        self._clock = clock
        self._sessions: dict[Session, None] = {}
        self._closing: list[Session] = []
        self._changed = asyncio.Event()
        self._waiting_since: float | None = None
        self.steps = 0
        drafters.arrived = self.wake

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        session.idle_since = self._clock()
        self._sessions[session] = None
        self.wake()

    def wake(self) -> None:
        """Something changed that a step may be planned from: a session, its credit, its candidates."""
        self._changed.set()

    def end(self, session: Session, reason: verifier_pb2.FinishReason, error: SlipstreamError | None = None) -> None:
        """The session is over: its drafters hear of it, its KV is free before the next step, its gateway is told."""
        if session.closed:
            return
        session.closed = True
        self._sessions.pop(session, None)
        self._drafters.detach(session)
        self._closing.append(session)
        failure = None if error is None else wire.failure_to_wire(error)
        session.say(
            verifier_pb2.SessionEnd(session=session.number, epoch=session.epoch, reason=reason, failure=failure)
        )
        self.wake()

    def roll_back(self, session: Session, rewind: Rewind) -> None:
        """Now, or as soon as the step in flight has ended, whose result is then void."""
        if session.in_step:
            session.rewind, session.epoch = rewind, rewind.epoch
            return
        session.rewind = None
        session.roll_back(rewind.epoch, rewind.length)
        self._drafters.reopen(session)
        self.wake()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            plan = self._planner.plan(self._sessions)
            if not plan.turns and not self._closing:
                await self._changed.wait()
                continue
            waited = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
            pause = self._planner.pause(plan, waited)
            if pause > 0.0:
                await self._wait(pause)
                continue
            self._waiting_since = None
            await self._step(plan)

    async def _wait(self, pause: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause)

    # Running and committing.

    async def _step(self, plan: Plan) -> None:
        turns = plan.turns
        closing, self._closing = self._closing, []
        started = self._clock()
        for turn in turns:
            turn.session.in_step = True
        outcomes = await self._thread.run(self._perform, turns, closing)
        ended = self._clock()
        self.steps += 1
        if not any(isinstance(outcome, SlipstreamError) for outcome in outcomes):
            self._planner.timed(plan, ended - started)
        for turn, outcome in zip(turns, outcomes, strict=True):
            self._finish(turn, outcome, started, ended)

    def _perform(self, turns: list[Turn], closing: list[Session]) -> list[Outcome]:
        """On the model's thread. A step that fails as a whole fails its sessions, not the verifier."""
        try:
            return perform(self._engine, turns, closing)
        except Exception as error:
            log.error("a verifier step failed", exc_info=error)
            return [Internal("the verifier failed in this session's step.") for _ in turns]

    def _finish(self, turn: Turn, outcome: Outcome, started: float, ended: float) -> None:
        session = turn.session
        session.in_step = False
        if session.closed:
            return
        if session.rewind is not None:
            self.roll_back(session, session.rewind)
        elif isinstance(outcome, SlipstreamError):
            self.end(session, verifier_pb2.FINISH_REASON_ERROR, outcome)
        elif outcome is None:
            session.computed = turn.computed + len(turn.pending)
        else:
            self._commit(turn, outcome, started, ended)

    def _commit(self, turn: Turn, verdict: Verdict, started: float, ended: float) -> None:
        session, chosen = turn.session, turn.selection
        path = [chosen.token_ids[node] for node in verdict.path]
        token_ids, reason = _clip(session, [*path, verdict.next_token])
        session.commit(token_ids, turn.base + len(path))
        self._planner.judged(turn, verdict)
        if verdict.dishonest:
            self._drafters.disbelieve(session, InvalidArgument("a draft token lay outside its own distribution."))
        session.say(
            verifier_pb2.Round(
                session=session.number,
                epoch=session.epoch,
                base_length=turn.base,
                token_ids=token_ids,
                drafted=len(chosen),
                accepted=min(len(path), len(token_ids)),
                wait_us=int((started - session.idle_since) * 1e6),
                verify_us=int((ended - started) * 1e6),
            )
        )
        session.idle_since = ended
        if reason is not None:
            self.end(session, reason)
        else:
            self._drafters.commit(session, turn.base, token_ids)


def _clip(session: Session, token_ids: list[int]) -> tuple[list[int], verifier_pb2.FinishReason | None]:
    """What of a round is committed: nothing after a stop token, nothing beyond max_length."""
    room = session.max_length - len(session.tokens)
    for index, token in enumerate(token_ids[:room]):
        if token in session.stop_token_ids:
            return token_ids[: index + 1], verifier_pb2.FINISH_REASON_STOP
    if len(token_ids) >= room:
        return token_ids[:room], verifier_pb2.FINISH_REASON_LENGTH
    return token_ids, None
