"""The verifier's loop: plan a step over all sessions, run it, commit what it decided. It never waits for the network
longer than waiting pays, and never for the gateway at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from slipstream.engine.engine import Engine, EngineLost
from slipstream.engine.model_thread import ModelThread
from slipstream.errors import Internal, InvalidArgument, SlipstreamError
from slipstream.rpc import proto_conversion
from slipstream.telemetry.tracing import Tracing
from slipstream.v1 import verifier_pb2
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.embedded import Outcome, ScheduledSequence, perform
from verifier_svc.scheduling.kv_admission import KVAdmission
from verifier_svc.scheduling.planner import Planner, StepLoad, StepPlan
from verifier_svc.scheduling.step_result import RoundResult, StepTiming, clip
from verifier_svc.scheduling.step_stats import StepStats
from verifier_svc.session import PendingRollback, Session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.tracing import stepped

log = logging.getLogger(__name__)


class Scheduler:
    """Sessions join and leave between steps."""

    def __init__(
        self,
        engine: Engine,
        thread: ModelThread,
        drafters: CandidateSources,
        planner: Planner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._drafters = drafters
        self._planner = planner
        self._clock = clock
        self._sessions: dict[Session, None] = {}
        self.memory = KVAdmission(engine)
        self.tally = StepStats()
        self._arrivals = 0
        self._closing: list[Session] = []
        self._changed = asyncio.Event()
        self._waiting_since: float | None = None
        self._results: list[RoundResult] = []
        """Of the last step, not told yet; empty whenever the loop waits."""
        self._took: tuple[StepPlan, StepTiming, list[Outcome]] | None = None
        """Of the last step, not learned from yet."""
        self.steps = self.tokens = 0
        """Steps taken, tokens committed."""
        self.tracing: Tracing | None = None
        drafters.on_candidates(self.wake)

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        session.idle_since = self._clock()
        self._arrivals += 1
        session.arrival = self._arrivals
        self._sessions[session] = None
        self.memory.add(session)
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
        self._drafters.detach_session(session)
        self._closing.append(session)
        failure = None if error is None else proto_conversion.failure_to_proto(error)
        session.say(
            verifier_pb2.SessionEnd(session=session.number, epoch=session.epoch, reason=reason, failure=failure)
        )
        self.wake()

    def roll_back(self, session: Session, rewind: PendingRollback) -> None:
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
            self._close()
            self._drafters.collect()
            plan = self._planner.plan(self.memory.enter())
            if not plan.turns:
                self._waiting_since = None  # those whom it was for are gone
                self._report()
                await self._changed.wait()
                continue
            waited = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
            pause = self._planner.pause(plan, waited)
            if pause > 0.0:
                self._report()
                await self._wait(pause)
                continue
            self._waiting_since = None
            if turns := self.memory.fit(plan.turns):
                await self._step(plan if turns is plan.turns else plan.only(turns), waited)
            else:
                self._report()
                await asyncio.sleep(0)

    def _close(self) -> None:
        """Frees the KV of sessions that ended; no step is running."""
        closing, self._closing = self._closing, []
        for session in closing:
            self.memory.remove(session)

    async def _wait(self, pause: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()

    # Running and committing.

    async def _step(self, plan: StepPlan, waited: float) -> None:
        """Runs a step that was held back for `waited` seconds."""
        turns = plan.turns
        started = self._clock()
        for turn in turns:
            turn.session.in_step = True
        step = self._thread.run(self._perform, turns)
        self._report()  # while the model is busy
        self._drafters.shadows.look(turns, self._planner.price)
        outcomes = await step
        ended = self._clock()
        self.steps += 1
        timing = StepTiming(started, ended, waited, StepLoad(len(turns), sum(turn.tokens for turn in turns)))
        if not any(isinstance(outcome, SlipstreamError) for outcome in outcomes):
            self._took = plan, timing, outcomes
        for turn, outcome in zip(turns, outcomes, strict=True):
            self._finish(turn, outcome, timing)

    def _perform(self, turns: list[ScheduledSequence]) -> list[Outcome]:
        """On the model's thread. A step that fails as a whole fails its sessions, not the verifier; only a lost group
        ends it, whose sessions go on elsewhere."""
        try:
            return perform(self._engine, turns)
        except EngineLost:
            raise
        except Exception as error:
            log.error("a verifier step failed", exc_info=error)
            return [Internal("the verifier failed in this session's step.") for _ in turns]

    def _finish(self, turn: ScheduledSequence, outcome: Outcome, timing: StepTiming) -> None:
        session = turn.session
        session.in_step = False
        if session.trace is not None and (session.closed or session.rewind is not None):
            session.trace.void(turn, timing, self.steps)
        if session.closed:
            return
        if session.rewind is not None:
            self.roll_back(session, session.rewind)
        elif isinstance(outcome, SlipstreamError):
            self.end(session, verifier_pb2.FINISH_REASON_ERROR, outcome)
        elif outcome is None:
            session.computed = turn.computed + len(turn.pending)
            if session.trace is not None:
                session.trace.read(turn, timing)
        else:
            self._commit(turn, outcome, timing)

    def _commit(self, turn: ScheduledSequence, verdict: AcceptanceResult, timing: StepTiming) -> None:
        session = turn.session
        path = [turn.selection.token_ids[node] for node in verdict.path]
        token_ids, reason = clip(session, [*path, verdict.next_token])
        result = RoundResult(turn, verdict, token_ids, timing, self._miss(session), timing.started - session.idle_since)
        session.commit(token_ids, turn.base + len(path))
        session.idle_since = timing.ended
        self._drafters.root_moved(session)
        self.tokens += len(token_ids)
        self._results.append(result)
        if reason is not None or verdict.dishonest:
            self._report()
        if verdict.dishonest:
            self._drafters.quarantine_session(
                session, InvalidArgument("a draft token lay outside its own distribution.")
            )
        if reason is not None:
            self.end(session, reason)

    def _report(self) -> None:
        """Tells drafters and gateways what was committed, and learns from it, while the next step runs: what is
        learned counts from the step after that.
        """
        if self._took is not None:
            plan, timing, outcomes = self._took
            tokens = self._planner.timed(plan, timing.seconds, timing.waited)
            self._count(plan, timing, outcomes, tokens)
            if self.tracing is not None:
                stepped(self.tracing, self.steps, plan, timing)
            self._took = None
        results, self._results = self._results, []
        for result in results:
            turn, verdict = result.turn, result.verdict
            session = turn.session
            scores = self._drafters.committed(session, turn.base, result.token_ids)
            message = result.message()
            message.cost_us = proto_conversion.microseconds(
                self._planner.cost_s(turn, result.timing.load, result.timing.seconds)
            )
            message.shadows.extend(scores)
            if session.trace is not None:
                message.ended_unix_nano = session.trace.verified(result, self.steps)
            session.say(message)
            self._planner.judged(turn, verdict)
            if turn.selection:
                self.tally.judged(turn.selection.depths, result.accepted)
        self._planner.prepare()

    def _count(self, plan: StepPlan, timing: StepTiming, outcomes: list[Outcome], tokens: int) -> None:
        sessions = len(outcomes)
        self.tally.step(sessions, tokens, timing.seconds, timing.waited)
        if tokens > sessions:
            pairs = zip(plan.turns, outcomes, strict=True)
            rejected = sum(
                len(turn.selection) - len(each.path) for turn, each in pairs if isinstance(each, AcceptanceResult)
            )
            self.tally.rolled_back_s += self._planner.spent(tokens, sessions, rejected)

    def _miss(self, session: Session) -> verifier_pb2.MissCause:
        """Why no candidate was there when the round before the present one ended."""
        if not session.miss or not session.max_draft_tokens:
            return verifier_pb2.MISS_CAUSE_UNSPECIFIED
        if not self._drafters.wanted:
            return verifier_pb2.MISS_CAUSE_NOT_WANTED
        return session.miss if self._drafters.has_source(session) else verifier_pb2.MISS_CAUSE_NO_DRAFTER
