"""Spans of a gateway: of each request that is traced, and of its session's rounds and writes to the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

import grpc
from opentelemetry.sdk.trace import Event
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, use_span

from gateway.request_context import RequestContext
from gateway.sessions.observer import RequestObserver, SessionObserver
from gateway.sessions.output_stream import Event as StreamEvent
from gateway.sessions.request_stats import MISSES, RoundCounters
from gateway.telemetry.kept_traces import ExemplarTrace, rejected, remarkable
from gateway.telemetry.request_metrics import Objectives
from slipstream.client.completion import FINISH_REASONS, TRACE_ID
from slipstream.errors import SERVER_ERRORS, SlipstreamError
from slipstream.telemetry import spans
from slipstream.telemetry.segments import REASONS, SlowRounds
from slipstream.telemetry.tracing import Span, Trace, Tracing, Value
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2

MOST_EVENTS = 128
SUMMED = (spans.WAIT, spans.QUEUE, spans.BUBBLE, spans.COMPUTE, spans.WIRE, spans.COMMITTING)
"""Seconds of rounds, which their segment adds up."""

CHAT_ROUTES = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Routes of HTTP whose operation is `chat`; so is a call by gRPC that sends a conversation."""
LEFT = 499
"""Status of what is not sent by HTTP, for the client has left."""

_request: ContextVar[RequestTrace | None] = ContextVar("request", default=None)
_exemplar: ContextVar[ExemplarTrace | None] = ContextVar("exemplar", default=None)


@contextmanager
def traced(tracing: Tracing, name: str, context: RequestContext, objectives: Objectives) -> Iterator[RequestObserver]:
    """Around a call of a client; its trace's id becomes a trailer. A session that is started inside a request that is
    sampled is traced too; of any other request there is one span, if it turns out to be worth that."""
    trace = tracing.begin(name, dict(context.headers))
    if trace is None:
        yield RequestObserver()
        return
    request = RequestTrace(trace, name, context, objectives)
    if trace.sampled:
        context.trailers[TRACE_ID] = trace.id
    token = _exemplar.set(ExemplarTrace.of(trace))
    try:
        with _present(request) if trace.sampled else nullcontext():
            yield request
    except BaseException as error:
        request.failed(error)
        raise
    finally:
        _exemplar.reset(token)
        if request.end():
            context.trailers[TRACE_ID] = trace.id


def _protocol(name: str, context: RequestContext) -> dict[str, Value]:
    """Attributes of the call's protocol, by OpenTelemetry's conventions."""
    if context.http_route:
        return {spans.HTTP_METHOD: context.http_method, spans.HTTP_ROUTE: context.http_route, spans.HTTP_STATUS: 200}
    return {spans.METHOD: f"slipstream.v1.GatewayService/{name.capitalize()}", spans.STATUS: "OK"}


@contextmanager
def _present(request: RequestTrace) -> Iterator[None]:
    token = _request.set(request)
    try:
        with use_span(NonRecordingSpan(request.trace.root)):  # what is logged meanwhile names it
            yield
    finally:
        _request.reset(token)


class RequestTrace(RequestObserver):
    """The span of one call of a client, from its arrival to its end."""

    def __init__(self, trace: Trace, name: str, context: RequestContext, objectives: Objectives) -> None:
        self.trace = trace
        self._objectives = objectives
        self._tpot_s = 0.0
        self._over_http = bool(context.http_route)
        self._began_s = trace.now()
        self._error = self._ended = False
        self._events: list[Event] = []
        self._attributes: dict[str, Value] = {
            spans.NAME: name,
            spans.OPERATION: spans.CHAT if context.http_route in CHAT_ROUTES else spans.TEXT_COMPLETION,
            spans.PROVIDER: spans.PROVIDER_NAME,
            spans.TENANT: context.tenant.name or None,
            **_protocol(name, context),
            spans.ASKED: trace.asked or None,
            spans.UNSAMPLED: None if trace.sampled else True,
        }

    def generate_requested(self, request: gateway_pb2.GenerateRequest) -> None:
        sampling = request.sampling
        if request.HasField("chat"):
            self._attributes[spans.OPERATION] = spans.CHAT
        for key, message, name in (
            (spans.MAX_TOKENS, request, "max_tokens"),
            (spans.TEMPERATURE, sampling, "temperature"),
            (spans.TOP_P, sampling, "top_p"),
            (spans.TOP_K, sampling, "top_k"),
        ):
            self._attributes[key] = getattr(message, name) if message.HasField(name) else None
        # Names are not checked yet, and may be of any length.
        self._attributes[spans.REQUEST_MODEL] = request.model[:64] or None
        self._attributes[spans.WORKLOAD] = request.workload[:64] or None

    def set_arm(self, arm: str) -> None:
        """`arm`: of the experiment that the request's session is in; empty for none."""
        self._attributes[spans.ARM] = arm or None

    def event_sent(self, event: StreamEvent) -> None:
        if isinstance(event, gateway_pb2.Started):
            self._attributes |= {
                spans.CONVERSATION: event.session_id,
                spans.RESPONSE_ID: f"{event.session_id}.{event.revision}",
                spans.RESPONSE_MODEL: event.model,
                spans.SEED: str(event.seed),  # 64 bits, where an attribute has 63
                spans.INPUT_TOKENS: len(event.prompt_token_ids),
            }
        elif isinstance(event, gateway_pb2.Finished):
            self._finished(event)
        elif spans.FIRST_CHUNK not in self._attributes:
            self._attributes[spans.FIRST_CHUNK] = self.trace.now() - self._began_s

    def add_event(self, name: str, attributes: Mapping[str, str | int]) -> None:
        """Something happened to the request's session, which other clients may follow for long after the request."""
        if not self._ended and len(self._events) < MOST_EVENTS:
            self._events.append(Event(name, attributes, self.trace.at(self.trace.now())))

    def failed(self, error: BaseException) -> None:
        if isinstance(error, SlipstreamError):
            status, reason, answer = error.code, error.reason, error.http_status
        elif isinstance(error, asyncio.CancelledError):
            status, reason, answer = grpc.StatusCode.CANCELLED, "CANCELLED", LEFT
        else:
            status, reason, answer = grpc.StatusCode.INTERNAL, type(error).__name__, 500
        sent: dict[str, Value] = {spans.HTTP_STATUS: answer} if self._over_http else {spans.STATUS: status.name}
        self._attributes |= sent | {spans.ERROR: reason}
        self._error = status in SERVER_ERRORS

    def end(self) -> bool:
        """Emit the request's span; whether it is worth one."""
        self._ended, ended_s = True, self.trace.now()
        self._attributes[spans.LATE] = self._late(ended_s - self._began_s) or None
        if not (self.trace.sampled or remarkable(self._attributes, self._error)):
            return False
        self.trace.emit(
            Span(
                self._span_name(),
                self._began_s,
                ended_s,
                self._attributes,
                context=self.trace.root,
                events=self._events,
                kind=SpanKind.SERVER,
                error=self._error,
            )
        )
        return True

    def _span_name(self) -> str:
        """By the GenAI conventions. The model is the one that answers: clients may write any name into a request, and
        names of spans should be few."""
        model = self._attributes.get(spans.RESPONSE_MODEL)
        operation = str(self._attributes[spans.OPERATION])
        return f"{operation} {model}" if model else operation

    def _late(self, seconds: float) -> bool:
        """Whether a request that took `seconds` missed the objectives; one without a token waited all the time."""
        first_s = self._attributes.get(spans.FIRST_CHUNK)
        return self._objectives.late(first_s if isinstance(first_s, float) else seconds, self._tpot_s, seconds)

    def _finished(self, finished: gateway_pb2.Finished) -> None:
        statistics = finished.statistics
        if statistics.emitted > 1:
            self._tpot_s = (statistics.e2e_s - statistics.ttft_s) / (statistics.emitted - 1)
        self._attributes |= {
            spans.FINISH_REASONS: (FINISH_REASONS.get(finished.reason, "unknown"),),
            spans.OUTPUT_TOKENS: finished.output_tokens,
            spans.ROUNDS: statistics.rounds,
            spans.DRAFTED: statistics.drafted,
            spans.ACCEPTED: statistics.accepted,
            **rejected(statistics.drafted, statistics.accepted),
            spans.REHOMED: statistics.rehomed,
            spans.ARITHMETIC: _arithmetic(statistics),
            spans.LOSSY: statistics.lossy or None,
            spans.MISSES: counts_of(statistics.misses),
            spans.BY_DRAFTER: tuple(
                f"{share.name} {share.accepted}/{share.drafted}" for share in statistics.drafters if share.drafted
            )
            or None,
            spans.WAIT: statistics.wait_s,
            spans.BUBBLE: statistics.bubble_s,
            spans.COMPUTE: statistics.verify_s,
        }


@dataclass(slots=True)
class RoundsSum:
    """The rounds of one segment."""

    context: SpanContext
    began_s: float
    """Monotonic seconds, as `ended_s`."""
    first: int
    """Number of the first round."""
    epoch: int
    length: int
    """Committed tokens before the first round."""
    ended_s: float = 0.0
    slowest_s: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """Sums of the attributes that are seconds."""
    counters: RoundCounters = field(default_factory=RoundCounters)

    def add(self, done: verifier_pb2.Round, began_s: float, ended_s: float, attributes: Mapping[str, Value]) -> None:
        """`attributes`: of the `round`, whether it has a span or not."""
        self.began_s, self.ended_s = min(self.began_s, began_s), max(self.ended_s, ended_s)
        self.slowest_s = max(self.slowest_s, ended_s - began_s)
        for key in SUMMED:
            seconds = attributes.get(key)
            if isinstance(seconds, float):
                self.waits[key] = self.waits.get(key, 0.0) + seconds
        self.counters.add_round(done, speculates=True)

    def span(self) -> Span:
        counters = self.counters
        shares = (f"{name} {share.accepted}/{share.drafted}" for name, share in sorted(counters.shares.items()))
        attributes: dict[str, Value] = {
            spans.INDEX: self.first,
            spans.ROUNDS: counters.rounds,
            spans.EPOCH: self.epoch,
            spans.LENGTH: self.length,
            spans.TOKENS: counters.emitted,
            spans.DRAFTED: counters.drafted,
            spans.ACCEPTED: counters.accepted,
            spans.MISSES: counts_of(counters.misses),
            spans.BY_DRAFTER: tuple(shares) or None,
            spans.SLOWEST: self.slowest_s,
            **self.waits,
        }
        return Span(spans.ROUNDS_SUM, self.began_s, self.ended_s, attributes, self.context)


class DecodeTrace(SessionObserver):
    """Spans of the session that a traced request runs; it may outlive the request while other clients follow it."""

    def __init__(self, request: RequestTrace) -> None:
        self._request = request
        self._trace = request.trace
        self._verifier = ""
        self._epoch = 0
        self._length = 0
        self._rounds = 0
        self._commit_began_s = 0.0
        self._since_s = 0.0
        """Time at which the last round ended, or the session was opened."""
        self._fresh = True
        """Whether no round came since the session was opened."""
        self._sum: RoundsSum | None = None
        self._slow = SlowRounds()

    def opening(self, verifier: str, epoch: int, length: int) -> None:
        self._verifier, self._epoch, self._length = verifier, epoch, length
        self._since_s, self._fresh = self._trace.now(), True
        where: dict[str, str | int] = {spans.ADDRESS: verifier, spans.EPOCH: self._epoch}
        self._request.add_event(spans.OPENED, where | {spans.LENGTH: self._length})

    def verifier_lost(self, error: SlipstreamError) -> None:
        what: dict[str, str | int] = {spans.ADDRESS: self._verifier, spans.EPOCH: self._epoch}
        self._request.add_event(spans.LOST, what | {spans.ERROR: error.reason})

    def arithmetic_changed(self, before: str, after: str, length: int) -> None:
        where: dict[str, str | int] = {spans.ARITHMETIC: after, spans.LENGTH: length}
        self._request.add_event(spans.ARITHMETIC_CHANGED, where)

    def drafters_reported(self, events: Sequence[verifier_pb2.DrafterEvent]) -> None:
        for event in events:
            if event.HasField("failure"):
                attributes = {spans.DRAFTER: event.drafter, spans.ERROR: event.failure.reason}
                self._request.add_event(spans.DRAFTER_LOST, attributes)
            else:
                self._request.add_event(spans.DRAFTER_RESTORED, {spans.DRAFTER: event.drafter})

    def commit_began(self) -> None:
        self._commit_began_s = self._trace.now()

    def commit_ended(self, rounds: Sequence[verifier_pb2.Round], error: BaseException | None) -> None:
        reason = None
        if error is not None:
            reason = error.reason if isinstance(error, SlipstreamError) else type(error).__name__
        self._emit_commit(rounds, self._commit_began_s, reason)

    def verifier_left(self, undone: Sequence[verifier_pb2.Round], *, complete: bool) -> None:
        self._emit_sum()
        if complete:
            return
        for done in undone:
            self._discard_round(self._trace.moment(done.ended_unix_nano) if done.ended_unix_nano else self._since_s)
            self._length = done.base_length + len(done.token_ids)
        self._discard_round(self._trace.now())  # in the middle of which it was left

    def _discard_round(self, ended_s: float) -> None:
        """Emits the span of a round that no client receives: spans of workers refer to it."""
        attributes: dict[str, Value] = {spans.INDEX: self._rounds, spans.EPOCH: self._epoch, spans.LENGTH: self._length}
        attributes |= {spans.DISCARDED: True, spans.REASON: REASONS[types_pb2.ROUND_REASON_FAILED]}
        context = self._trace.round(self._epoch, self._length)
        self._trace.emit(Span(spans.ROUND, min(self._since_s, ended_s), ended_s, attributes, context))
        self._rounds, self._since_s = self._rounds + 1, ended_s

    def _emit_commit(self, rounds: Sequence[verifier_pb2.Round], began_s: float, error: str | None) -> None:
        ended_s = self._trace.now()
        contexts: list[SpanContext] = []
        """Spans of the rounds that have one."""
        slow = self._slow.judge(ended_s - began_s)
        for done in rounds:
            context = self._trace.round(done.epoch, done.base_length)
            verified_s = min(self._trace.moment(done.ended_unix_nano), began_s) if done.ended_unix_nano else began_s
            waited_s = 0.0 if self._fresh else done.wait_us / 1e6
            attributes = self._attributes_of(done) | {
                spans.WIRE: began_s - verified_s,
                spans.COMMITTING: ended_s - began_s,
            }
            round_began_s = verified_s - done.verify_us / 1e6 - waited_s
            parent = self._add_to_sum(done, round_began_s, ended_s, attributes)
            if reason := self._reason(done, error, slow=slow):
                contexts.append(context)
                attributes[spans.REASON] = reason
                self._trace.emit(Span(spans.ROUND, round_began_s, ended_s, attributes, context, parent))
            self._rounds, self._fresh, self._since_s = self._rounds + 1, False, verified_s
            self._length = done.base_length + len(done.token_ids)
        if not contexts:
            return
        tokens = sum(len(done.token_ids) for done in rounds)
        written: dict[str, Value] = {spans.ROUNDS: len(rounds), spans.TOKENS: tokens, spans.ERROR: error}
        self._trace.emit(
            Span(spans.COMMIT, began_s, ended_s, written, None, contexts[-1], contexts[:-1], error=error is not None)
        )

    def _reason(self, done: verifier_pb2.Round, error: str | None, *, slow: bool) -> str:
        """The reason for a span of the round's own; empty for none. `slow`: the write to the store was."""
        if error is not None:
            return REASONS[types_pb2.ROUND_REASON_FAILED]
        if not self._trace.segment_tokens:
            return REASONS[types_pb2.ROUND_REASON_ASKED]
        return REASONS.get(done.traced) or (REASONS[types_pb2.ROUND_REASON_SLOW] if slow else "")

    def _add_to_sum(
        self, done: verifier_pb2.Round, began_s: float, ended_s: float, attributes: Mapping[str, Value]
    ) -> SpanContext | None:
        """The span of the round's segment; None where there are none."""
        if not self._trace.segment_tokens:
            return None
        context = self._trace.segment(done.epoch, done.base_length)
        if self._sum is None or self._sum.context != context:
            self._emit_sum()
            self._sum = RoundsSum(context, began_s, self._rounds, done.epoch, done.base_length)
        self._sum.add(done, began_s, ended_s, attributes)
        return context

    def _emit_sum(self) -> None:
        if self._sum is not None:
            self._trace.emit(self._sum.span())
            self._sum = None

    def _attributes_of(self, done: verifier_pb2.Round) -> dict[str, Value]:
        waits: dict[str, Value] = {}
        if not self._fresh:  # the first round waited for the prompt
            wait_s, bubble_s = done.wait_us / 1e6, done.bubble_us / 1e6
            waits = {spans.WAIT: wait_s, spans.BUBBLE: bubble_s, spans.QUEUE: wait_s - bubble_s}
        return waits | {
            spans.INDEX: self._rounds,
            spans.EPOCH: done.epoch,
            spans.LENGTH: done.base_length,
            spans.TOKENS: len(done.token_ids),
            spans.DRAFTED: done.drafted,
            spans.ACCEPTED: done.accepted,
            spans.MISS: "not_wanted"
            if done.miss == verifier_pb2.MISS_CAUSE_NOT_WANTED
            else MISSES.get(done.miss) or None,
            spans.DRAFTERS: tuple(share.drafter for share in done.drafters) or None,
            spans.COMPUTE: done.verify_us / 1e6,
        }


def counts_of(counts: Mapping[str, int]) -> tuple[str, ...] | None:
    return tuple(f"{name} {count}" for name, count in sorted(counts.items())) or None


def _arithmetic(statistics: gateway_pb2.Statistics) -> str | None:
    names = [each.arithmetic for each in statistics.arithmetics]
    if len(names) < 2:
        return names[0] if names else None
    return ", ".join(f"{each.arithmetic} from {each.offset}" for each in statistics.arithmetics)


def session_trace(arm: str) -> DecodeTrace | None:
    """The observer of the session that the current request starts or takes up; None where the request is not traced."""
    request = _request.get()
    if request is None:
        return None
    request.set_arm(arm)
    return DecodeTrace(request)


def current_exemplar() -> ExemplarTrace | None:
    """The trace of the current request, sampled or not; None where tracing is off."""
    return _exemplar.get()


def current_context() -> Callable[[], types_pb2.TraceContext] | None:
    """Makes the message with which a verifier joins the current request's trace; None where it is not traced."""
    request = _request.get()
    return None if request is None else request.trace.context
