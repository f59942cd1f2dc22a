"""The life of a session, as one coroutine: open on a verifier, take rounds, log, show, and end for one good reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from structlog.contextvars import bind_contextvars

from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.router import prefix_hashes
from gateway.routing.verifiers import VerifierWorker
from gateway.sessions.context import GatewayContext
from gateway.sessions.drafter_assignment import DrafterAssignment
from gateway.sessions.output_stream import OutputStream
from gateway.sessions.verifier_session import SessionEnded, VerifierSession
from gateway.store.session_log import SessionLog
from gateway.telemetry.request_metrics import outcome_of
from gateway.telemetry.request_stats import RequestStats
from gateway.telemetry.tracing import session_trace
from slipstream.errors import Aborted, ResourceExhausted, SlipstreamError, Unavailable
from slipstream.rpc import proto_conversion
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from slipstream.v1.verifier_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
)


class SessionRun:
    """Runs a session that its log holds, and tells its story. Cancelled, it leaves everything and lets the session wait
    for whoever resumes it."""

    def __init__(
        self,
        name: str,
        plan: ResolvedRequest,
        stage: GatewayContext,
        log: SessionLog,
        story: OutputStream,
        ledger: RequestStats,
    ) -> None:
        self.id = name
        self.ledger = ledger
        self._meters = stage.meters
        ledger.series = stage.meters.of(plan)
        self._plan = plan
        self._router = stage.router
        self._config = stage.config
        self._log = log
        self._story = story
        self._crew = DrafterAssignment(plan, stage.router)
        begins = log.epoch == 1 and not story.tokens  # what was taken up is not measured: its beginning is not known
        self._watch = stage.trial.watch(plan.arm, name) if stage.trial and plan.arm and begins else None
        self._verifier: VerifierWorker | None = None
        self._seat: VerifierSession | None = None
        self._opened = False
        self._trace = session_trace(plan.arm)
        self._avoid: set[VerifierWorker] = set()
        """Verifiers that failed this session or had no room for it: others come first."""
        self._cancelled = False
        self.ending = False
        """Whether nothing is left but to write down how it ended."""
        self.ended = asyncio.Event()
        story.took = self._took

    def cancel(self) -> None:
        """End soon; KV on the verifier is free at once."""
        self._cancelled = True
        if self._seat is not None:
            self._seat.close()
            self._seat.end(SessionEnded(FINISH_REASON_CANCELLED))
        self._story.wake()
        self._router.changes.notify_all()

    async def renew(self) -> None:
        """Keeps the lease, however long nothing is written. A session that another owner took ends here. Gives up when
        it is time for the next renewal, for others wait for it."""
        try:
            async with asyncio.timeout(self._config.renewal_s):
                await self._log.renew()
        except Aborted as error:
            if self._seat is not None:
                self._seat.end(SessionEnded(FINISH_REASON_ERROR, error))
        except (SlipstreamError, TimeoutError):  # the store is away: the next write waits for it
            pass

    async def run(self) -> None:
        """Until the session ended. What its clients must be told is told by the story, an error too; but where another
        owner took the session, that one knows: raises Aborted."""
        bind_contextvars(session=self.id)
        self._meters.sessions += 1
        outcome = "failed"
        try:
            finished = self._conclude(await self._decode())
            outcome = FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
        except (asyncio.CancelledError, Aborted) as error:
            outcome = outcome_of(error) if isinstance(error, Aborted) else "left"
            await self._suspend()
            raise
        except (Unavailable, ResourceExhausted) as error:  # others may go on with it
            outcome = outcome_of(error)
            await self._suspend()
            self._story.fail(error)
        except SlipstreamError as error:
            outcome = outcome_of(error)
            await self._record(gateway_pb2.Finished(reason=FINISH_REASON_ERROR))
            self._story.fail(error)
        except Exception:
            await self._record(gateway_pb2.Finished(reason=FINISH_REASON_ERROR))
            raise
        else:
            occupancy = self._crew.occupancy
            await self._record(finished)
            self._story.finish(finished)
            if self._watch is not None:
                self._watch.end(finished, occupancy)
        finally:
            self.ended.set()
            self._meters.sessions -= 1
            self._meters.ended(outcome, self.ledger)

    async def _decode(self) -> FinishReason:
        """Take rounds, on one verifier after the other if need be, until there is a reason to end."""
        while not self._cancelled:
            if self._story.transcript.stop:  # perhaps in what an earlier owner wrote
                return FINISH_REASON_STOP
            if self._seat is None and (reason := self._complete()):
                return reason
            seat = self._seat or await self._settle()
            if seat is None:
                continue
            news = await seat.listen(self._steps, self._config.stall_s)
            self._crew.learn(news)
            if self._trace is not None:
                self._trace.heard(news.events)
            if self._crew.look(self._length, hurry=bool(news.events)):
                seat.attach(self._crew.addresses)
            await self._show(news.rounds)
            if not self._story.transcript.stop and news.end is not None and (reason := self._weigh(news.end)):
                return reason
        return FINISH_REASON_CANCELLED

    async def _settle(self) -> VerifierSession | None:
        """A seat on the best verifier; waits for one, but not for ever. None when there is a reason to look again."""
        if self._opened:  # whatever the former verifier still says is of the past
            await self._log.raise_epoch()
            self.ledger.rehomed += 1
            self._meters.rehomings += 1
        self._opened = True
        await self._story.lags(self._config.credit_tokens, lambda: self._cancelled)
        known = self._beginnings()
        try:
            with self._meters.placing():
                async with asyncio.timeout(self._config.rehoming_wait_s):
                    while (verifier := self._place(known)) is None or self._cancelled:
                        if self._cancelled:
                            return None
                        await self._router.changes.wait()
        except TimeoutError as error:
            raise Unavailable("No verifier is ready for this model; retry.", reason="NO_VERIFIER") from error
        seat = verifier.seat()
        self._verifier, self._seat = verifier, seat
        self._router.affinity.note(known, verifier)
        self._crew.moved()
        self._crew.look(self._length, hurry=True)
        try:
            seat.open(self._opening())
        except SlipstreamError as error:
            seat.end(SessionEnded(FINISH_REASON_ERROR, error))
        return seat

    def _place(self, known: Sequence[bytes]) -> VerifierWorker | None:
        model = self._plan.model.name
        return self._router.place(model, self._avoid, known) or self._router.place(model, (), known)

    def _beginnings(self) -> list[bytes]:
        return prefix_hashes([*self._plan.prompt, *self._story.tokens], self._plan.salt)

    def _steps(self) -> int:
        return self._verifier.steps if self._verifier else 0

    async def _show(self, rounds: list[verifier_pb2.Round]) -> None:
        """Log first, then show: what a client saw is never taken back by a fault. Only what is shown is counted: what a
        write that was interrupted left in the log counts nowhere, rather than twice."""
        tokens = [token for done in rounds for token in done.token_ids]
        if tokens:
            with contextlib.nullcontext() if self._trace is None else self._trace.committing(rounds):
                await self._log.append(tokens)
            self._story.tell(tokens, [each for done in rounds for each in done.logprobs])
        for done in rounds:
            self.ledger.add(done)
            if self._watch is not None:
                self._watch.add(done)

    def _took(self, tokens: int) -> None:
        """The client which is farthest took so many more: a slow one spends no more credit."""
        if self._seat is not None:
            self._seat.credit(tokens)

    def _weigh(self, end: SessionEnded) -> FinishReason:
        """The reason to end, or UNSPECIFIED when the session is to be opened again. Raises what cannot be mended."""
        if end.reason == FINISH_REASON_CANCELLED:
            return end.reason
        if reason := self._complete():  # even if only the news of the end was lost
            return reason
        error = end.error or Unavailable("The verifier ended the session before its text did.", reason="PROTOCOL")
        if self._verifier is not None:
            self._avoid.add(self._verifier)
        if self._trace is not None:
            self._trace.lost(error)
        self._leave()
        mendable = isinstance(error, (Unavailable, ResourceExhausted))
        if not mendable or self.ledger.rehomed >= self._config.rehomings:
            raise error
        if isinstance(error, ResourceExhausted) and not self._router.place(self._plan.model.name, self._avoid):
            raise error  # waiting in line is the client's choice
        return FINISH_REASON_UNSPECIFIED

    @property
    def _length(self) -> int:
        return len(self._plan.prompt) + len(self._story.tokens)

    def _complete(self) -> FinishReason:
        if self._story.tokens and self._story.tokens[-1] in self._plan.stop_token_ids:
            return FINISH_REASON_STOP
        if self._length >= self._plan.max_length:
            return FINISH_REASON_LENGTH
        return FINISH_REASON_UNSPECIFIED

    def _conclude(self, reason: FinishReason) -> gateway_pb2.Finished:
        """Shows the text that was held back. Of the record's tokens the first `output_tokens` carry the text."""
        transcript = self._story.transcript
        self._story.conclude()
        reason = FINISH_REASON_STOP if transcript.stop else reason
        return gateway_pb2.Finished(reason=reason, stop=transcript.stop, output_tokens=transcript.carrying())

    def _leave(self) -> None:
        if self._verifier is not None:
            self._router.affinity.note(self._beginnings(), self._verifier)
        if self._seat is not None:
            self._seat.close()
            if self._trace is not None and not self._complete():
                self._trace.left()
        self._seat = self._verifier = None

    async def _suspend(self) -> None:
        """The session holds nothing but its record, which anybody may take up."""
        self.ending = True
        self._leave()
        self._crew.disband()
        with contextlib.suppress(SlipstreamError):
            await self._log.release()

    async def _record(self, finished: gateway_pb2.Finished) -> None:
        """The outcome, for whoever asks later. A store that refuses it changes nothing for the client."""
        self.ending = True
        self._leave()
        self._crew.disband()
        self.ledger.close()
        if finished.reason == FINISH_REASON_ERROR:
            finished.output_tokens = len(self._story.tokens)
        finished.statistics.CopyFrom(self.ledger.statistics())
        with contextlib.suppress(SlipstreamError):
            await self._log.finish(finished.SerializeToString())

    def _opening(self) -> verifier_pb2.DecodeOpen:
        plan, address = self._plan, self._verifier.address if self._verifier is not None else ""
        return verifier_pb2.DecodeOpen(
            key=types_pb2.SessionKey(id=self.id, epoch=self._log.epoch),
            prefix=types_pb2.Prefix(token_ids=[*plan.prompt, *self._story.tokens], prompt_length=len(plan.prompt)),
            sampling=proto_conversion.sampling_to_proto(plan.sampling),
            max_length=plan.max_length,
            stop_token_ids=plan.stop_token_ids,
            policy=verifier_pb2.DecodePolicy(max_draft_tokens=plan.max_draft_tokens),
            drafters=self._crew.addresses,
            credit=max(1, self._config.credit_tokens - self._story.lag),
            prediction_token_ids=plan.prediction,
            cache_salt=plan.salt,
            workload=plan.workload,
            priority=plan.priority,
            structured_output=proto_conversion.structure_to_proto(plan.structure),
            top_logprobs=plan.top_logprobs,
            trace=None if self._trace is None else self._trace.opened(address, self._log.epoch, self._length),
        )
