"""Spans of traced sessions: their prefill, their rounds, and the steps that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from opentelemetry.trace import SpanContext

from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Span, Trace, Tracing, Value
from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.observer import RoundResult, StepObserver, StepReport, StepTiming
from verifier_svc.session import Session

MAX_AWAITED_DRAFTERS = 64


class VerifierTracing(StepObserver):
    """Emits spans of the sessions whose Open carries a sampled trace."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self.traces: dict[Session, VerifyTrace] = {}

    def session_opened(self, session: Session, request: verifier_pb2.DecodeOpen) -> None:
        trace = self._tracing.join(request.trace)
        if trace is not None:
            self.traces[session] = VerifyTrace(trace, trace.now())

    def session_ended(self, session: Session) -> None:
        self.traces.pop(session, None)

    def step_ended(self, report: StepReport) -> None:
        """Emits a span of the step if a traced session decoded in it."""
        if not self.traces:
            return
        traced = ((self.traces.get(each.session), each) for each in report.step if each.complete)
        rounds = [trace.round_context(each) for trace, each in traced if trace is not None]
        if rounds:
            trace, timing = self._tracing.alone(self._tracing.step(report.number)), report.timing
            attributes: dict[str, Value] = {
                spans.INDEX: report.number,
                spans.SESSIONS: len(report.step),
                spans.TOKENS: timing.tokens,
                spans.DRAFTED: sum(len(scheduled.selection) for scheduled in report.step),
                spans.BUBBLE: timing.waited,
            }
            trace.emit(Span(spans.STEP, timing.started, timing.ended, attributes, context=trace.root, links=rounds))

    def prefill_advanced(self, scheduled: ScheduledSequence, timing: StepTiming) -> None:
        if trace := self.traces.get(scheduled.session):
            trace.add_prefill(scheduled, timing)

    def sequence_discarded(self, scheduled: ScheduledSequence, timing: StepTiming, step_number: int) -> None:
        if trace := self.traces.get(scheduled.session):
            trace.emit_discarded(scheduled, timing, step_number)

    def round_reported(self, result: RoundResult, message: verifier_pb2.Round) -> None:
        if trace := self.traces.get(result.scheduled.session):
            message.ended_unix_nano = trace.emit_round(result)

    def drafter_opened(self, session: Session, drafter: str, request: drafter_pb2.DraftOpen) -> None:
        if trace := self.traces.get(session):
            request.trace.CopyFrom(trace.trace.context(drafter))

    def drafter_informed(self, session: Session, source: int, length: int, now: float) -> None:
        if trace := self.traces.get(session):
            trace.await_candidates(source, length, now)

    def candidates_received(self, session: Session, source: int, candidates: types_pb2.Candidates, now: float) -> None:
        if trace := self.traces.get(session):
            trace.add_frame(source, candidates, now)


class TracedFrame(NamedTuple):
    at_s: float
    """Monotonic seconds at which the frame arrived."""
    size: int
    """Bytes."""
    draft: SpanContext | None
    """The drafter's span; None for a drafter that does not trace."""
    wire_s: float | None
    """Seconds that commit and frame were under way; None for a frame on an older commit."""


class VerifyTrace:
    """The trace of one session. All times are seconds of the event loop's monotonic clock."""

    def __init__(self, trace: Trace, opened_s: float) -> None:
        self.trace = trace
        self._opened_s = opened_s
        """Seconds at which the session was opened; infinite once its prefill was emitted."""
        self._prefill_s = math.inf
        """Seconds at which the first prefill step started."""
        self._prefill_steps = 0
        self._computing_s = 0.0
        self._cached = 0
        self._awaited: dict[int, tuple[int, float]] = {}
        """By source: the committed length that a drafter was sent last, and when; until its candidates arrive."""
        self._frames: list[TracedFrame] = []
        """Frames since the start of the last step."""
        self._drafts: list[SpanContext] = []
        """Drafters' spans of the last frames before that step."""
        self._round: tuple[tuple[int, int], SpanContext] | None = None

    def await_candidates(self, source: int, length: int, now: float) -> None:
        self._awaited[source] = length, now
        if len(self._awaited) > MAX_AWAITED_DRAFTERS:  # drafters that were opened again and never answered
            del self._awaited[next(iter(self._awaited))]

    def add_frame(self, source: int, candidates: types_pb2.Candidates, now: float) -> None:
        draft = wire_s = None
        if candidates.HasField("mark"):
            mark = candidates.mark
            draft = self.trace.draft(candidates.epoch, source, mark.length)
            length, sent_s = self._awaited.get(source, (-1, 0.0))
            if mark.length == length:
                del self._awaited[source]
                wire_s = max(0.0, now - sent_s - mark.held_us / 1e6)
        self._frames.append(TracedFrame(now, candidates.ByteSize(), draft, wire_s))

    def add_prefill(self, scheduled: ScheduledSequence, timing: StepTiming) -> None:
        """Counts a step that computed a piece of the prompt."""
        if not self._prefill_steps:
            self._prefill_s = timing.started
            self._cached = scheduled.computed
        self._prefill_steps += 1
        self._computing_s += timing.seconds

    def emit_round(self, result: RoundResult) -> int:
        """Emits the round's span. Returns the Unix nanoseconds at which the step ended."""
        scheduled, timing = result.scheduled, result.timing
        if self._prefill_steps or len(scheduled.pending) > 1 or self._opened_s < math.inf:
            self.add_prefill(scheduled, timing)
            self._emit_prefill(scheduled, timing)
        chosen = scheduled.selection
        frames = [frame for frame in self._frames if frame.at_s <= timing.started]
        self._frames = self._frames[len(frames) :]
        drafts = {frame.draft.span_id: frame.draft for frame in frames if frame.draft is not None}
        self._drafts = [*drafts.values()] or self._drafts
        attributes: dict[str, Value] = {
            spans.DRAFTED: len(chosen),
            spans.ACCEPTED: result.accepted,
            spans.DEPTH: max(chosen.depths, default=0),
            spans.BUDGET: scheduled.session.max_draft_tokens,
            spans.FRAMES: len(frames),
            spans.BYTES: sum(frame.size for frame in frames),
            spans.WIRE: min((frame.wire_s for frame in frames if frame.wire_s is not None), default=None),
        }
        links = self._drafts if len(chosen) else ()
        self._emit_verify(timing, attributes, result.step_number, self.round_context(scheduled), links)
        return self.trace.at(timing.ended)

    def round_context(self, scheduled: ScheduledSequence) -> SpanContext:
        """Span of the sequence's round, cached because two spans refer to it."""
        place = scheduled.session.epoch, scheduled.base
        if self._round is None or self._round[0] != place:
            self._round = place, self.trace.round(*place)
        return self._round[1]

    def emit_discarded(self, scheduled: ScheduledSequence, timing: StepTiming, step_number: int) -> None:
        """Emits the span of a sequence whose session was closed while the step ran."""
        if scheduled.complete:
            attributes: dict[str, Value] = {spans.DRAFTED: len(scheduled.selection), spans.DISCARDED: True}
            self._emit_verify(timing, attributes, step_number)
        else:
            self.add_prefill(scheduled, timing)
            self._emit_prefill(scheduled, timing)

    def _emit_verify(
        self,
        timing: StepTiming,
        attributes: dict[str, Value],
        step_number: int,
        parent: SpanContext | None = None,
        links: Sequence[SpanContext] = (),
    ) -> None:
        step_span = self.trace.tracing.step(step_number)
        self.trace.emit(
            Span(spans.VERIFY, timing.started, timing.ended, attributes, parent=parent, links=(step_span, *links))
        )

    def _emit_prefill(self, scheduled: ScheduledSequence, timing: StepTiming) -> None:
        """The last prefill step also decides the first token, so it is part of a round as well."""
        began = min(self._opened_s, self._prefill_s)
        attributes = {
            spans.EPOCH: scheduled.session.epoch,
            spans.TOKENS: scheduled.base,
            spans.CACHED: self._cached,
            spans.PASSES: self._prefill_steps,
            spans.QUEUE: self._prefill_s - began,
            spans.COMPUTE: self._computing_s,
        }
        self.trace.emit(Span(spans.PREFILL, began, timing.ended, attributes))
        self._opened_s, self._prefill_steps, self._computing_s = math.inf, 0, 0.0
