"""The verifier's loop: plan a step over all sessions, run it on the model's thread, commit what it decided.

Sessions are added and removed between steps. Tokens that a step decided are committed at once, and reported to
gateways, drafters and observers while the next step runs, so that the model is never idle for it. The loop waits for
candidates only as long as the wait policy allows, and never for a gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from slipstream.engine.model_thread import ModelThread
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.rpc import proto_conversion
from slipstream.telemetry.composite import composite
from slipstream.v1 import verifier_pb2
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.executor import ScheduledSequence, StepExecutor, StepOutcome
from verifier_svc.execution.fault_isolation import FaultIsolation
from verifier_svc.rounds.observer import MessageAnnotator, StepObserver, StepReport
from verifier_svc.rounds.round_result import RoundResult, StepTiming
from verifier_svc.scheduling.kv_admission import KVAdmission
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepPlan
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources


class Scheduler:
    def __init__(
        self,
        executor: StepExecutor,
        thread: ModelThread,
        sources: CandidateSources,
        planner: Planner,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.executor = executor
        self._isolation = FaultIsolation(executor)
        self.step_faults = self._isolation.faults
        self._thread = thread
        self._sources = sources
        self._planner = planner
        self._clock = clock
        self.observer = composite(StepObserver, observers)
        annotators = [each for each in observers if isinstance(each, MessageAnnotator)]
        self.annotator = composite(MessageAnnotator, annotators)
        self._sessions: dict[Session, None] = {}
        self.kv_admission = KVAdmission(executor.kv, clock)
        self._arrivals = 0
        self._kv_to_free: list[Session] = []
        """Sessions that ended and still have KV."""
        self._unreported_ends: list[Session] = []
        """Sessions without KV whose end was not yet reported to the observers."""
        self._changed = asyncio.Event()
        self._waiting_since: float | None = None
        self._due: float | None = None
        """When the next step could have started (`StepTiming.due`); None while there is nothing to do."""
        self._unreported_step: tuple[StepPlan, StepTiming, list[StepOutcome]] | None = None
        self._unreported_rounds: list[RoundResult] = []
        """Empty whenever the loop waits, as is `_unreported_step`."""
        self.steps = 0
        self.tokens = 0
        """Committed tokens of all sessions."""
        sources.on_candidates(self.wake)
        sources.observe_with(tuple(observers), self.annotator)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pause_cause(self) -> str:
        """Why drafters pause (`WaitPolicy.pause_cause`); empty while they draft."""
        return self._planner.pause_cause

    @property
    def drafting_slowdown(self) -> float:
        """`WaitPolicy.drafting_slowdown`"""
        return self._planner.drafting_slowdown

    def open_session(self, session: Session, request: verifier_pb2.DecodeOpen) -> None:
        """Opens the session on its sources of candidates, and decodes it from the next step on."""
        self.observer.session_opened(session, request)
        self._planner.open_session(session)
        try:
            self._sources.attach_session(session, request.drafters)
        except BaseException:  # left half attached, it would be opened again on every link that is restored
            self._sources.detach_session(session)
            self._unreported_ends.append(session)
            raise
        self.add_session(session)

    def add_session(self, session: Session) -> None:
        """Decodes the session from the next step on."""
        session.idle_since = self._clock()
        self._arrivals += 1
        session.arrival = self._arrivals
        self._sessions[session] = None
        self.kv_admission.add_session(session)
        self.wake()

    def wake(self) -> None:
        """Plans again: sessions, credits or candidates changed."""
        self._changed.set()

    def end_session(
        self, session: Session, reason: verifier_pb2.FinishReason, error: SlipstreamError | None = None
    ) -> None:
        """Ends the session on its drafters and sends its gateway a SessionEnd; its KV is free before the next step.

        It is called for a complete text, for a close by the gateway (`GatewayStream._change_session`), for all sessions
        of a gateway whose stream ended, and for errors. If the running step holds the session, its KV stays until that
        step has ended, and the step's result for it is discarded. Then `run` calls `_free_kv`, which calls
        `KVAdmission.remove_session`, which closes the KV sequence (`KVCache.close`): its blocks are in the pool again.
        """
        if session.closed:
            return
        session.closed = True
        self._sessions.pop(session, None)
        self._kv_to_free.append(session)
        failure = None if error is None else proto_conversion.failure_to_proto(error)
        end = verifier_pb2.SessionEnd(
            session=session.request.number, epoch=session.request.epoch, reason=reason, failure=failure
        )
        try:
            self._sources.detach_session(session)
            if session.constraint is not None:
                session.constraint.close()
        finally:  # whatever fails there, its KV is freed and its gateway receives the end
            session.request.stream.end(end)
            self.wake()

    async def run(self) -> None:
        """Plans and runs steps until it is cancelled; frees the KV of ended sessions before each plan. It waits between
        two steps for two reasons: no session can run, or the planned step is worth holding back (`Planner.hold_s`; the
        docstring of `verifier_svc.wait_policy` lists what for). Any change ends the wait: the step is planned anew."""
        while True:
            self._changed.clear()
            self._free_kv()
            self._sources.collect()
            plan = self._planner.plan(self.kv_admission.admit())
            if not plan.step:
                self._waiting_since = self._due = None  # the sessions that were waited for have ended
                self._report()
                await self._wait_for_change(self.kv_admission.next_return_s)
                continue
            if self._due is None:
                self._due = self._clock()
            waited = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
            hold_s = self._planner.hold_s(plan, waited)
            if hold_s > 0.0:
                self._report()
                if self._waiting_since is None:
                    self._waiting_since = self._clock()
                await self._wait_for_change(hold_s)
                continue
            self._waiting_since = None
            if step := self.kv_admission.fit(plan.step):
                await self._run_step(plan if step is plan.step else plan.only(step), self._due, waited)
            else:
                self._report()
                await asyncio.sleep(0)

    def _free_kv(self) -> None:
        """Frees the KV of sessions that ended; no step is running."""
        ended, self._kv_to_free = self._kv_to_free, []
        for session in ended:
            self.kv_admission.remove_session(session)
        self._unreported_ends += ended

    async def _wait_for_change(self, limit_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()

    # Running and committing.

    async def _run_step(self, plan: StepPlan, due: float, waited: float) -> None:
        """Runs a step that was held back for `waited` seconds."""
        step = plan.step
        started = self._clock()
        for scheduled in step:
            scheduled.session.in_step = True
        running = self._thread.run(self._isolation.run_step, step)
        self._report()
        self.observer.step_started(step, self._planner.candidate_price)
        outcomes = await running
        self.steps += 1
        tokens = sum(scheduled.tokens for scheduled in step)
        timing = StepTiming(due, started, self._clock(), waited, len(step), tokens)
        self._due = timing.ended
        if self._isolation.undisturbed and not any(isinstance(outcome, SlipstreamError) for outcome in outcomes):
            self._unreported_step = plan, timing, outcomes
        for scheduled, outcome in zip(step, outcomes, strict=True):
            self._finish(scheduled, outcome, timing)

    def _finish(self, scheduled: ScheduledSequence, outcome: StepOutcome, timing: StepTiming) -> None:
        session = scheduled.session
        session.in_step = False
        if session.closed:
            self.observer.sequence_discarded(scheduled, timing, self.steps)
        elif isinstance(outcome, SlipstreamError):
            self.end_session(session, verifier_pb2.FINISH_REASON_ERROR, outcome)
        elif outcome is None:
            session.computed = scheduled.computed + len(scheduled.pending)
            self.observer.prefill_advanced(scheduled, timing)
        else:
            self._commit(scheduled, outcome, timing)

    def _commit(self, scheduled: ScheduledSequence, result: AcceptanceResult, timing: StepTiming) -> None:
        session = scheduled.session
        path = [scheduled.selection.token_ids[node] for node in result.path]
        token_ids, reason = session.clip([*path, result.next_token])
        miss, idle_s = self._miss(session), timing.started - session.idle_since
        self._unreported_rounds.append(RoundResult(scheduled, result, token_ids, timing, self.steps, miss, idle_s))
        session.commit(token_ids, scheduled.base + len(path))
        if session.window is not None:
            session.window.advance(result.window, len(scheduled.window), token_ids)
        session.idle_since = timing.ended
        self._sources.root_moved(session)
        self.tokens += len(token_ids)
        if reason is not None or result.dishonest:
            self._report()  # the last Round goes out before the session's end does
        if result.dishonest:
            self._sources.quarantine_session(
                session, InvalidArgument("a draft token lay outside its own distribution.", reason="DISHONEST")
            )
        if reason is not None:
            self.end_session(session, reason)

    def _miss(self, session: Session) -> verifier_pb2.MissCause:
        """Cause for which the session's tree was empty when its previous round ended."""
        if not session.miss or not session.request.max_draft_tokens:
            return verifier_pb2.MISS_CAUSE_UNSPECIFIED
        if not self._sources.wants(session):
            return verifier_pb2.MISS_CAUSE_NOT_WANTED
        return session.miss if self._sources.has_source(session) else verifier_pb2.MISS_CAUSE_NO_DRAFTER

    # Reporting.

    def _report(self) -> None:
        """Sends committed tokens on, and updates the planner's measurements, for the step after this one on."""
        if self._unreported_step is not None:
            plan, timing, outcomes = self._unreported_step
            self._unreported_step = None
            rejected_s = self._planner.feedback.observe_step(plan, timing, outcomes)
            report = StepReport(self.steps, plan.step, timing, rejected_s)
            self.observer.step_ended(report)
        rounds, self._unreported_rounds = self._unreported_rounds, []
        for result in rounds:
            self._report_round(result)
        ended, self._unreported_ends = self._unreported_ends, []
        for session in ended:
            self._planner.session_ended(session)
            self.observer.session_ended(session)
        self._planner.prepare()

    def _report_round(self, result: RoundResult) -> None:
        scheduled, session = result.scheduled, result.scheduled.session
        self.observer.round_decided(result)
        self._sources.committed(session, scheduled.base, result.token_ids)
        message = result.message(self._planner.feedback.cost_s(scheduled, result.timing))
        session.found_tokens = 0
        session.top_prompt_logprobs, session.prompt_logprobs = None, {}
        self.observer.round_reported(result)
        self.annotator.annotate_round(result, message)
        session.request.stream.send(message)
        self._planner.feedback.observe_round(scheduled, result.result)
