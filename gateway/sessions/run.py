"""One session while this gateway runs it, as one coroutine: open it on a verifier, receive rounds, append their tokens
to the session log, append them to the clients' stream, end. It alone decides when a session is opened again on another
verifier and when it fails. Rounds come from `VerifierWorker.receive`. Every token that a verifier sends goes through
`_commit_and_show`: SessionLog.append first, OutputStream.append_tokens after it, from where `registry` sends events to
clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from structlog.contextvars import bind_contextvars

from gateway.config import GatewayConfig
from gateway.requests.resolved_request import ResolvedRequest
from gateway.requests.validation import RandomBits
from gateway.routing.router import Router
from gateway.routing.verifier_choice import prefix_hashes
from gateway.routing.verifier_session import Received, SessionEnded, VerifierSession
from gateway.routing.verifiers import VerifierWorker
from gateway.sessions.arithmetic_spans import Spans, moves_of, opened, spans_of, wanted, with_spans, written
from gateway.sessions.drafter_assignment import DrafterAssignment
from gateway.sessions.observer import Observers, outcome_of
from gateway.sessions.output_stream import OutputStream, ignore_taken
from gateway.sessions.request_stats import RequestStats, describe_rounds
from gateway.sessions.state import SessionLife, SessionState
from gateway.sessions.verifier_search import VerifierSearch
from gateway.store.session_log import SessionLog
from gateway.work.pieces import give_way
from slipstream.errors import Aborted, ResourceExhausted, SlipstreamError, Unavailable
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from slipstream.v1.verifier_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
)

log = logging.getLogger(__name__)

PROMPT_PIECE = 64
"""Tokens of a prompt whose log-probabilities are read at a time: with those of 20 likeliest tokens each some 1 ms."""


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """The parts that all sessions of a gateway share."""

    config: GatewayConfig
    router: Router
    random_bits: RandomBits
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    observers: Observers = field(default_factory=Observers)
    sampling_defaults: types_pb2.SamplingOptions = field(default_factory=types_pb2.SamplingOptions)
    """Sampling parameters of requests that set none."""


class SessionRun:
    """Runs a session that its log holds, and fills its stream. Cancelled, it leaves everything and releases the session
    for the gateway that resumes it."""

    def __init__(
        self,
        resolved: ResolvedRequest,
        context: GatewayContext,
        log: SessionLog,
        stream: OutputStream,
        life: SessionLife,
        arrived_at: float,
    ) -> None:
        """`arrived_at`: monotonic seconds, from which the client's waiting is counted."""
        self.id = log.id
        self._life = life
        self._resolved = resolved
        self._router = context.router
        self._config = context.config
        self._log = log
        self._stream = stream
        self._search = VerifierSearch(resolved, context.router, context.config, life)
        self._spans = spans_of(log.params)
        from_beginning = log.epoch == 1 and not stream.tokens
        self._all_logged = from_beginning or context.config.durability == "strict"
        """Whether no client can have more of the text than is known here."""
        self._drafters = DrafterAssignment(resolved, context.router)
        self.stats = RequestStats.of_request(resolved, context.clock, arrived_at, context.router.predicts)
        self.stats.arithmetics = self._written
        self._observer = context.observers.watch_session(self.id, resolved, self.stats, from_beginning=from_beginning)
        self._trace_context = context.observers.trace_context()
        self._verifier: VerifierWorker | None = None
        self._verifier_session: VerifierSession | None = None
        self._opened = False
        self._blame = 0.0
        """Losses that this session may have caused, others' shares left out."""
        self.ended = asyncio.Event()
        stream.on_taken = self._add_credit

    def choose_mixed(self, mixed: bool) -> None:
        """Whether another arithmetic may go on with the text, by a client that resumed the session."""
        self._search.mixed = mixed

    def cancel(self) -> None:
        """End soon; KV memory on the verifier is free before its next step."""
        self._life.enter(SessionState.CANCELLED)
        if self._verifier_session is not None:
            self._verifier_session.close()
            self._verifier_session.end(SessionEnded(FINISH_REASON_CANCELLED))
        self._stream.wake()
        self._router.changes.notify_all()

    async def renew_lease(self) -> None:
        """Keep the lease, however long nothing is written. A session that another owner took ends here. Gives up when
        it is time for the next renewal, for the renewals of other sessions wait for this one."""
        try:
            async with asyncio.timeout(self._config.renewal_s):
                await self._log.renew()
        except Aborted as error:
            if self._verifier_session is not None:
                self._verifier_session.end(SessionEnded(FINISH_REASON_ERROR, error))
        except (SlipstreamError, TimeoutError):  # the store is away: the next write waits for it
            pass

    async def run(self) -> None:
        """Run the session to its end, which clients receive by the stream, as an error where it is one. Raises Aborted
        where another owner took the session and continues it."""
        bind_contextvars(session=self.id)
        self._life.enter(SessionState.WAITING)
        self._observer.run_began()
        outcome = "failed"
        try:
            finished = self._finish_text(await self._decode())
            outcome = FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
        except (asyncio.CancelledError, Aborted) as error:
            outcome = outcome_of(error) if isinstance(error, Aborted) else "disconnected"
            await self._suspend()
            raise
        except (Unavailable, ResourceExhausted) as error:  # another gateway may go on with it
            outcome = outcome_of(error)
            await self._suspend(error)
            self._stream.fail(error)
        except SlipstreamError as error:
            outcome = outcome_of(error)
            await self._record_end(gateway_pb2.Finished(reason=FINISH_REASON_ERROR))
            self._stream.fail(error)
        except Exception:
            await self._record_end(gateway_pb2.Finished(reason=FINISH_REASON_ERROR))
            raise
        else:
            occupancy = self._drafters.occupancy
            await self._record_end(finished)
            self._stream.finish(finished)
            self._observer.session_finished(finished, occupancy)
        finally:
            self._report_ended(outcome)

    def _report_ended(self, outcome: str) -> None:
        self._stream.on_taken = ignore_taken  # a ring would keep text and tokens until the next collection
        self.ended.set()
        self._observer.run_ended(outcome)

    async def _decode(self) -> FinishReason:
        """Take rounds, on one verifier after the other if need be, until there is a reason to end."""
        while not self._life.cancelled:
            if self._stream.transcript.stop:  # perhaps in what an earlier owner wrote
                return FINISH_REASON_STOP
            if self._verifier_session is None and (reason := self._completed()):
                return reason
            session = self._verifier_session or await self._open_on_verifier()
            if session is None:
                continue
            received = await session.receive_until_stalled(self._verifier_steps, self._config.stall_s)
            self._update_drafters(session, received)
            await self._commit_and_show(received.rounds)
            stopped = self._stream.transcript.stop
            if not stopped and received.end is not None and (reason := self._handle_end(received.end)):
                return reason
        return FINISH_REASON_CANCELLED

    def _update_drafters(self, session: VerifierSession, received: Received) -> None:
        self._drafters.apply_received(received)
        if received.events:
            self._observer.drafters_reported(received.events)
        if self._drafters.reassign(self._length, hurry=bool(received.events)):
            session.attach_drafters(self._drafters.addresses)

    async def _open_on_verifier(self) -> VerifierSession | None:
        """The session on the best verifier; waits for one up to the configured time. None when it was cancelled."""
        if self._opened:  # the next epoch fences off what the former verifier may still send
            await self._raise_epoch()
            self.stats.rehomed += 1
            self._observer.reopening()
        self._opened = True
        await self._stream.wait_for_clients(self._config.credit_tokens, lambda: self._life.cancelled)
        prefixes = self._prefixes()
        self._observer.verifier_wait_began()
        try:
            verifier = await self._search.wait(prefixes, wanted(self._written))
        finally:
            self._observer.verifier_wait_ended()
        if verifier is None:
            return None
        arithmetic = verifier.arithmetic
        await self._record_arithmetic(arithmetic)
        await give_way(self._length)
        if verifier.model is None or verifier.arithmetic != arithmetic:  # another one came to its address meanwhile
            return None
        session = verifier.new_session()
        self._verifier, self._verifier_session = verifier, session
        self._life.enter(SessionState.DECODING)
        self._router.affinity.note(prefixes, verifier)
        self._drafters.forget_lost_links()
        self._drafters.reassign(self._length, hurry=True)
        try:
            session.open(self._open_request(verifier))
        except SlipstreamError as error:
            session.end(SessionEnded(FINISH_REASON_ERROR, error))
        return session

    @property
    def _written(self) -> Spans:
        """The spans that decide how the session goes on."""
        return written(self._spans, len(self._stream.tokens)) if self._all_logged else self._spans

    async def _record_arithmetic(self, arithmetic: str) -> None:
        """Record the arithmetic that writes from here on, before it does."""
        before = wanted(self._written)
        spans = opened(self._spans, len(self._stream.tokens), arithmetic)
        if before and spans and arithmetic != before:
            log.warning("the text goes on with arithmetic %s, and was written by %s so far", arithmetic, before)
            self._observer.arithmetic_changed(before, arithmetic, self._length)
        if spans != self._spans:
            self._spans = spans
            await self._raise_epoch()
            await self._log.settle()  # relaxed too: a gateway that goes on after this one knows the name from there
        self.stats.arithmetics = spans

    async def _raise_epoch(self) -> None:
        """Fence off what was sent under the present epoch. The record counts it: it is no doing of its client's, who is
        charged for a session that it resumes often."""
        await self._log.raise_epoch(with_spans(self._log.params, self._spans, moves_of(self._log.params) + 1))

    def _prefixes(self) -> list[bytes]:
        return prefix_hashes([*self._resolved.prompt, *self._stream.tokens], self._resolved.salt)

    def _verifier_steps(self) -> int:
        return self._verifier.steps if self._verifier else 0

    async def _commit_and_show(self, rounds: list[verifier_pb2.Round]) -> None:
        """Log first (`relaxed`: enqueue), then show: no fault takes back what a client saw. Only what is shown is
        counted: tokens whose write was interrupted are in no counter, rather than in two."""
        tokens = [token for done in rounds for token in done.token_ids]
        prompt = [each for done in rounds for each in done.prompt_logprobs]
        for start in range(0, len(prompt), PROMPT_PIECE):
            self._stream.set_prompt_logprobs(start, prompt[start : start + PROMPT_PIECE])
            await asyncio.sleep(0)
        if tokens:
            self._observer.commit_began()
            try:
                await self._log.append(tokens)
            except BaseException as error:
                self._observer.commit_ended(rounds, error)
                raise
            self._observer.commit_ended(rounds, None)
            shown = len(self._stream.tokens)
            details = list(describe_rounds(rounds, self.stats, shown)) if self._resolved.rounds else ()
            self._stream.append_tokens(tokens, [each for done in rounds for each in done.logprobs], details)
        for done in rounds:
            self.stats.add_round(done)
            self._observer.round_shown(done)

    def _add_credit(self, tokens: int) -> None:
        """The farthest client took so many more tokens: the verifier may generate as many. A slow client gives none."""
        if self._verifier_session is not None:
            self._verifier_session.add_credit(tokens)

    def _handle_end(self, end: SessionEnded) -> FinishReason:
        """The reason to end, or UNSPECIFIED when the session is to be opened again. Raises an error that no other
        verifier can mend."""
        if end.reason == FINISH_REASON_CANCELLED:
            return end.reason
        if reason := self._completed():  # even if only the message of the end was lost
            return reason
        error = end.error or Unavailable("The verifier ended the session before its text did.", reason="PROTOCOL")
        if self._verifier is not None:
            self._search.note_failure(self._verifier, error)
        self._observer.verifier_lost(error)
        self._leave_verifier()
        mendable = isinstance(error, (Unavailable, ResourceExhausted))
        if not mendable or self._blame + end.blame > self._config.rehomings:
            raise error
        self._blame += end.blame
        if isinstance(error, ResourceExhausted) and not self._search.untried(wanted(self._written)):
            raise error  # waiting in line is the client's choice
        return FINISH_REASON_UNSPECIFIED

    @property
    def _length(self) -> int:
        return len(self._resolved.prompt) + len(self._stream.tokens)

    def _stop_token(self) -> int | None:
        """The last token, if it ends the output."""
        last = self._stream.tokens[-1] if self._stream.tokens else None
        return last if last in self._resolved.stop_token_ids else None

    def _completed(self) -> FinishReason:
        if self._stop_token() is not None:
            return FINISH_REASON_STOP
        if self._length >= self._resolved.max_length:
            return FINISH_REASON_LENGTH
        return FINISH_REASON_UNSPECIFIED

    def _finish_text(self, reason: FinishReason) -> gateway_pb2.Finished:
        """Make the text that was held back final; `output_tokens` of the record's tokens carry the text."""
        transcript = self._stream.transcript
        self._stream.conclude()
        reason = FINISH_REASON_STOP if transcript.stop else reason
        return gateway_pb2.Finished(
            reason=reason,
            stop=transcript.stop,
            output_tokens=transcript.carrying(),
            stop_token_id=None if transcript.stop else self._stop_token(),
        )

    def _leave_verifier(self) -> None:
        if self._verifier_session is not None:
            self._verifier_session.close()
            self._observer.verifier_left(self._verifier_session.undone, complete=bool(self._completed()))
        if self._verifier is not None:
            self._router.affinity.note(self._prefixes(), self._verifier)
        self._verifier_session = self._verifier = None
        self._life.enter(SessionState.WAITING)

    async def _suspend(self, error: SlipstreamError | None = None) -> None:
        """Leave nothing of the session but its record, which any gateway may take up."""
        self._life.enter(SessionState.ENDING)
        self._leave_verifier()
        self._drafters.release_all()
        if error is not None and self._log.gave_up:  # clients need not wait for a store that does not answer
            self._stream.fail(error)
        with contextlib.suppress(SlipstreamError):
            await self._log.release()

    async def _record_end(self, finished: gateway_pb2.Finished) -> None:
        """Write the outcome for clients that ask later. A store that refuses it changes nothing for those here."""
        self._life.enter(SessionState.ENDING)
        self._leave_verifier()
        self._drafters.release_all()
        self.stats.close()
        if finished.reason == FINISH_REASON_ERROR:
            finished.output_tokens = len(self._stream.tokens)
        finished.statistics.CopyFrom(self.stats.statistics())
        with contextlib.suppress(SlipstreamError):
            await self._log.finish(finished.SerializeToString())

    def _open_request(self, verifier: VerifierWorker) -> verifier_pb2.DecodeOpen:
        request = self._resolved.open_request(self._stream.tokens, self._drafters.addresses)
        request.key.CopyFrom(types_pb2.SessionKey(id=self.id, epoch=self._log.epoch))
        request.credit = max(1, self._config.credit_tokens - self._stream.lag)
        request.arithmetic = verifier.announced
        self._observer.opening(verifier.address, self._log.epoch, len(request.prefix.token_ids))
        if self._trace_context is not None:
            request.trace.CopyFrom(self._trace_context())
        return request
