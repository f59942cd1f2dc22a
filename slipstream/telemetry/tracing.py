"""Spans: how a process creates them, and the traces that they belong to.

A span is created when its operation has ended, with the times of its begin and end. So no span stays open, the event
loops pay for nothing but a look at the clock, and a process can refer to a span that another one will send: span ids
are hashes of what the span is about. OpenTelemetry's instrumentation of gRPC fits neither streams that carry many
sessions nor frames that are pushed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from uuid import uuid4

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from slipstream.telemetry.segments import SEGMENT_TOKENS
from slipstream.telemetry.spans import UNSENT_PARENT_KEY, UNSENT_PARENT_VALUE
from slipstream.v1 import types_pb2
from slipstream.version import running_version

Value = str | bool | int | float | tuple[str, ...] | None
"""Value of an attribute; an attribute that is None is left out."""

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
FINE, FAILED = Status(), Status(StatusCode.ERROR)
SCOPE = InstrumentationScope("slipstream")
CLOSE_S = 1.0
"""Most seconds that a process waits at its end for its last spans to be exported."""
NAMED = Struct(">QII")
SEGMENTS = 1 << 32
"""Owners from here on are those of segments: numbers of sessions have 32 bits."""
DAY_S = 86_400.0
"""A peer's clock that differs by more is ignored."""
BELIEVED_S = 1.0
"""A message that seems to arrive within this time of being sent shows that both clocks agree well enough."""


def current_trace_id() -> str:
    """The trace that the running code belongs to, as 32 hex digits; empty outside of a sampled span."""
    context = get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else ""


def resource_of(service: str) -> Resource:
    """Attributes of the process that every span carries. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` come before
    the rest, so that a manifest can give the pod's names (`k8s.*`) and its id as `service.instance.id`."""
    ours = {
        "service.name": service,
        "service.version": running_version(),
        "service.instance.id": str(uuid4()),
        "slipstream.role": service.removeprefix("slipstream-"),
    }
    given = OTELResourceDetector().detect().attributes
    return Resource.create({**ours, **given})


@dataclass(frozen=True, slots=True)
class Clocks:
    """The process's clocks; replaced in tests."""

    wall_ns: Callable[[], int] = time.time_ns
    monotonic_s: Callable[[], float] = time.monotonic


class Tracing:
    """The spans of one process. `begin` starts a trace, `join` takes part in one that a peer started."""

    def __init__(
        self,
        service: str,
        processors: Sequence[SpanProcessor],
        clocks: Clocks | None = None,
        sent: Callable[[], int] = lambda: 0,
        segment_tokens: int = SEGMENT_TOKENS,
        keep_percent: float = 100.0,
    ) -> None:
        """`service` is the name in traces unless `OTEL_*` has one; the sampler and the rest of the resource come from
        there. `sent` returns the number of exported spans. `segment_tokens`: of the traces that begin here; 0 for spans
        of every round. `keep_percent`: those that the collector keeps of the sampled traces that are not
        remarkable."""
        provider = TracerProvider(resource=resource_of(service), shutdown_on_exit=False)
        self.resource = provider.resource
        self.sampler: Sampler = provider.sampler
        self.processors = processors
        self.clocks = clocks or Clocks()
        self.segment_tokens = segment_tokens
        self.keep_percent = keep_percent
        self.made = 0
        self._sent = sent
        self._steps = random.getrandbits(64) << 64

    def begin(self, name: str, carrier: Mapping[str, str]) -> Trace | None:
        """The trace of a request: the client's own if it sent a `traceparent`. None where tracing is off. A client that
        sends no spans marks that in its `tracestate`: then its trace begins here, and misses no parent."""
        if self.sampler is ALWAYS_OFF:
            return None
        context = TraceContextTextMapPropagator().extract(carrier)
        parent = get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else random.getrandbits(128) or 1
        # Not by the trace's own id: the client chooses that, and could so decide what a sampler by ratio does.
        decision = self.sampler.should_sample(context, random.getrandbits(128), name, SpanKind.SERVER).decision
        sampled = decision is Decision.RECORD_AND_SAMPLE
        root = SpanContext(trace_id, random.getrandbits(64) or 1, is_remote=False, trace_flags=SAMPLED)
        asked = parent.is_valid and parent.trace_flags.sampled and isinstance(self.sampler, ParentBased)
        sent = parent.is_valid and parent.trace_state.get(UNSENT_PARENT_KEY) != UNSENT_PARENT_VALUE
        return Trace(self, root, self._offset_ns(), parent if sent else None, asked, sampled, self.segment_tokens)

    def join(self, context: types_pb2.TraceContext) -> Trace | None:
        """The trace of a peer's message; None for a message without a valid one."""
        trace_id = int.from_bytes(context.trace_id)
        if len(context.trace_id) != 16 or not (trace_id and context.span_id):
            return None
        offset_ns = self._offset_ns()
        late_ns = self._now_ns(offset_ns) - context.sent_unix_nano
        if not 0 <= late_ns <= BELIEVED_S * 1e9 and abs(late_ns) <= DAY_S * 1e9:
            offset_ns -= late_ns
        root = SpanContext(trace_id, context.span_id, is_remote=True, trace_flags=SAMPLED)
        return Trace(self, root, offset_ns, segment_tokens=context.segment_tokens)

    def step(self, number: int) -> SpanContext:
        """The span of this process's step `number`, in a trace of its own. Its id follows from the number, so that
        spans of sessions can link to it before it is sent."""
        return SpanContext(self._steps | number, number, is_remote=False, trace_flags=SAMPLED)

    def alone(self, root: SpanContext) -> Trace:
        """A trace with spans of this process only."""
        return Trace(self, root, self._offset_ns())

    def counts(self) -> dict[tuple[str, ...], float]:
        """Number of spans by outcome, for the metric SPANS."""
        return {("made",): self.made, ("sent",): self._sent()}

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Exports the remaining spans for at most `limit_s` seconds; the library alone would wait for a collector that
        does not answer."""
        end = self.clocks.monotonic_s() + limit_s
        closing = [threading.Thread(target=each.shutdown, name="tracing-end", daemon=True) for each in self.processors]
        for each in closing:
            each.start()
        for each in closing:
            each.join(max(0.0, end - self.clocks.monotonic_s()))

    def _offset_ns(self) -> int:
        return self.clocks.wall_ns() - int(self.clocks.monotonic_s() * 1e9)

    def _now_ns(self, offset_ns: int) -> int:
        return offset_ns + int(self.clocks.monotonic_s() * 1e9)


@dataclass(slots=True)
class Span:
    """An operation that has ended."""

    name: str
    began_s: float
    """Monotonic seconds, as `ended_s`."""
    ended_s: float
    attributes: Mapping[str, Value]
    context: SpanContext | None = None
    """Its ids, where other spans refer to it."""
    parent: SpanContext | None = None
    """None stands for the request's own span."""
    links: Iterable[SpanContext] = ()
    events: Iterable[Event] = ()
    kind: SpanKind = SpanKind.INTERNAL
    error: bool = False


@dataclass(slots=True)
class Trace:
    """One traced request, as one process sees it."""

    tracing: Tracing
    root: SpanContext
    """The request's own span."""
    offset_ns: int
    """Nanoseconds from this process's monotonic clock to the trace's wall clock. Read once, so that setting the clock
    moves no span, and corrected if it disagrees with the peer's by more than a message can take."""
    parent: SpanContext | None = None
    """The client's span, if it sent one."""
    asked: bool = False
    """Whether the client requested the trace and the sampler follows it."""
    sampled: bool = True
    """Whether rounds are traced; otherwise only the request's own span may be sent, at its end."""
    segment_tokens: int = 0
    """Committed tokens whose rounds share a span; 0: each round has its own (`slipstream.telemetry.segments`)."""
    _prefix: bytes = field(init=False)
    """Prefix of all hashes that give span ids."""

    def __post_init__(self) -> None:
        self._prefix = self.root.trace_id.to_bytes(16) + self.root.span_id.to_bytes(8)

    @property
    def id(self) -> str:
        return f"{self.root.trace_id:032x}"

    def now(self) -> float:
        """Monotonic seconds."""
        return self.tracing.clocks.monotonic_s()

    def at(self, moment_s: float) -> int:
        """Converts monotonic seconds to Unix nanoseconds."""
        return self.offset_ns + int(moment_s * 1e9)

    def moment(self, unix_ns: int) -> float:
        """Converts Unix nanoseconds to monotonic seconds."""
        return (unix_ns - self.offset_ns) / 1e9

    def context(self, receiver: str = "") -> types_pb2.TraceContext:
        """The message with which a peer joins the trace."""
        return types_pb2.TraceContext(
            trace_id=self.root.trace_id.to_bytes(16),
            span_id=self.root.span_id,
            sent_unix_nano=self.at(self.now()),
            receiver=receiver,
            segment_tokens=self.segment_tokens,
        )

    def round(self, epoch: int, length: int) -> SpanContext:
        """The span of the round on a committed prefix of `length` tokens, the same in every process."""
        return self._named(0, epoch, length)

    def segment(self, epoch: int, length: int) -> SpanContext:
        """The span of the rounds of the segment that a round on `length` committed tokens is in."""
        return self._named(SEGMENTS, epoch, length // self.segment_tokens)

    def draft_segment(self, epoch: int, number: int, length: int) -> SpanContext:
        """The span of a drafter's work in that segment."""
        return self._named(SEGMENTS + 1 + number, epoch, length // self.segment_tokens)

    def draft(self, epoch: int, number: int, length: int) -> SpanContext:
        """The span of a drafter's work on `length` committed tokens. `number` is its verifier's number of the
        session."""
        return self._named(1 + number, epoch, length)

    def fresh(self) -> SpanContext:
        """Ids of a span that no other process refers to."""
        return SpanContext(self.root.trace_id, random.getrandbits(64) or 1, is_remote=False, trace_flags=SAMPLED)

    def emit(self, span: Span) -> None:
        """Hands a span that has ended to the exporters."""
        made = ReadableSpan(
            span.name,
            span.context or self.fresh(),
            self.parent if span.context is self.root else span.parent or self.root,
            self.tracing.resource,
            {key: _readable(value) for key, value in span.attributes.items() if value is not None},
            tuple(span.events),
            tuple(map(Link, span.links)),
            span.kind,
            status=FAILED if span.error else FINE,
            start_time=self.at(span.began_s),
            end_time=self.at(max(span.began_s, span.ended_s)),
            instrumentation_scope=SCOPE,
        )
        for processor in self.tracing.processors:
            self.tracing.made += 1
            processor.on_end(made)

    def _named(self, owner: int, epoch: int, length: int) -> SpanContext:
        digest = blake2b(self._prefix + NAMED.pack(owner, epoch, length), digest_size=8).digest()
        return SpanContext(self.root.trace_id, int.from_bytes(digest) or 1, is_remote=True, trace_flags=SAMPLED)


def _readable(value: Value) -> Value:
    """Seconds to the microsecond: sums of floats are 0.35046299999999996 on the pages of trace viewers."""
    return round(value, 6) if isinstance(value, float) else value
