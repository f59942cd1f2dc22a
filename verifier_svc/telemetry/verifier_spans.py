"""Spans of traced sessions: their prefill, their rounds, and the steps that they share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.trace import SpanContext

from slipstream.telemetry import spans
from slipstream.telemetry.segments import REASONS, RoundChooser
from slipstream.telemetry.tracing import Span, Trace, Tracing, Value
from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.rounds.observer import MessageAnnotator, StepObserver, StepReport
from verifier_svc.rounds.round_result import RoundResult, StepTiming
from verifier_svc.session import DraftedSession, Session

MAX_AWAITED_DRAFTERS = 64
MOST_UNDER_WAY = 256
"""Most rounds of a session that are remembered because its gateway may not have received them."""
RoundReason = types_pb2.RoundReason


class VerifierTracing(StepObserver, MessageAnnotator):
    """Emits spans of the sessions whose Open carries a sampled trace."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self.traces: dict[DraftedSession, VerifyTrace] = {}
        self._step: StepReport | None = None
        """The last step, until its span is emitted."""

    def session_opened(self, session: Session, request: verifier_pb2.DecodeOpen) -> None:
        trace = self._tracing.join(request.trace)
        if trace is not None:
            self.traces[session] = VerifyTrace(trace, trace.now())

    def session_closed(self, session: Session, length: int) -> None:
        if length and (trace := self.traces.get(session)):
            trace.close(length)

    def session_ended(self, session: Session) -> None:
        if trace := self.traces.pop(session, None):
            trace.emit_sum()

    def step_ended(self, report: StepReport) -> None:
        """Emits a span of the step if spans of every round of a session in it are wanted."""
        self._step = None
        if self.traces:
            traced = [self.traces.get(each.session) for each in report.step if each.complete]
            self._step = report if any(traced) else None
            if any(trace is not None and not trace.trace.segment_tokens for trace in traced):
                self._emit_step(report)

    def round_decided(self, result: RoundResult) -> None:
        """Emits a span of the step with the first of its rounds that has spans of its own."""
        trace = self.traces.get(result.scheduled.session)
        if trace is not None and trace.choose(result) and self._step and self._step.number == result.step_number:
            self._emit_step(self._step)

    def _emit_step(self, report: StepReport) -> None:
        self._step = None
        traced = ((self.traces.get(each.session), each) for each in report.step if each.complete)
        rounds = [trace.linked_context(each) for trace, each in traced if trace is not None]
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

    def annotate_round(self, result: RoundResult, message: verifier_pb2.Round) -> None:
        if trace := self.traces.get(result.scheduled.session):
            message.ended_unix_nano = trace.emit_round(result)
            message.traced = trace.reason

    def annotate_open(self, session: DraftedSession, drafter: str, request: drafter_pb2.DraftOpen) -> None:
        if trace := self.traces.get(session):
            request.trace.CopyFrom(trace.trace.context(drafter))

    def annotate_commit(self, session: DraftedSession, commit: drafter_pb2.DraftCommit) -> None:
        if trace := self.traces.get(session):
            commit.traced = bool(trace.reason)

    def drafter_informed(self, session: DraftedSession, source: int, length: int, now: float) -> None:
        if trace := self.traces.get(session):
            trace.await_candidates(source, length, now)

    def candidates_received(
        self, session: DraftedSession, source: int, candidates: types_pb2.Candidates, now: float
    ) -> None:
        if trace := self.traces.get(session):
            trace.add_frame(source, candidates, now)


class TracedFrame(NamedTuple):
    at_s: float
    """Monotonic seconds at which the frame arrived."""
    size: int
    """Bytes."""
    drafted: tuple[int, int, int] | None
    """Epoch, source and committed length at the drafter, which name its span; None for a drafter that does not
    trace."""
    wire_s: float | None
    """Seconds that commit and frame were under way; None for a frame on an older commit."""


@dataclass(slots=True)
class VerifySum:
    """The rounds of one segment."""

    context: SpanContext
    """The gateway's span of the segment."""
    epoch: int
    began_s: float
    """Monotonic seconds, as `ended_s`."""
    ended_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    frames: int = 0
    size: int = 0
    wire_s: float | None = None
    slowest_s: float = 0.0
    computing_s: float = 0.0
    drafts: dict[int, SpanContext] = field(default_factory=dict)
    """Drafters' spans, by span id."""

    def add(self, timing: StepTiming, attributes: Mapping[str, Any]) -> None:
        """`attributes`: of the round's `verify`, whether it has one or not."""
        self.ended_s = timing.ended
        self.rounds += 1
        self.drafted += attributes[spans.DRAFTED]
        self.accepted += attributes[spans.ACCEPTED]
        self.depth = max(self.depth, attributes[spans.DEPTH])
        self.frames += attributes[spans.FRAMES]
        self.size += attributes[spans.BYTES]
        if (wire_s := attributes[spans.WIRE]) is not None:
            self.wire_s = max(self.wire_s or 0.0, wire_s)
        self.slowest_s = max(self.slowest_s, timing.seconds)
        self.computing_s += timing.seconds

    def span(self) -> Span:
        attributes: dict[str, Value] = {
            spans.ROUNDS: self.rounds,
            spans.EPOCH: self.epoch,
            spans.DRAFTED: self.drafted,
            spans.ACCEPTED: self.accepted,
            spans.DEPTH: self.depth,
            spans.FRAMES: self.frames,
            spans.BYTES: self.size,
            spans.WIRE: self.wire_s,
            spans.SLOWEST: self.slowest_s,
            spans.COMPUTE: self.computing_s,
        }
        links = [*self.drafts.values()]
        return Span(spans.VERIFY_SUM, self.began_s, self.ended_s, attributes, parent=self.context, links=links)


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
        self._drafts: list[tuple[int, int, int]] = []
        """Names of the drafters' spans of the last frames before that step."""
        self.reason: RoundReason = types_pb2.ROUND_REASON_UNSPECIFIED
        """Why the last round has spans of its own."""
        self._chooser = RoundChooser(trace.segment_tokens)
        self._chosen: set[int] = set()
        """Committed lengths before the rounds that have spans of their own."""
        self._sum: VerifySum | None = None
        self._round: tuple[tuple[int, int], SpanContext] | None = None
        self._under_way: deque[tuple[ScheduledSequence, StepTiming]] = deque(maxlen=MOST_UNDER_WAY)
        """Rounds with spans of their own, which the gateway may not have received."""
        self._received: int | None = None
        """Tokens that the gateway had when it closed the session."""

    def await_candidates(self, source: int, length: int, now: float) -> None:
        self._awaited[source] = length, now
        if len(self._awaited) > MAX_AWAITED_DRAFTERS:  # drafters that were opened again and never answered
            del self._awaited[next(iter(self._awaited))]

    def add_frame(self, source: int, candidates: types_pb2.Candidates, now: float) -> None:
        drafted = wire_s = None
        if candidates.HasField("mark"):
            mark = candidates.mark
            drafted = candidates.epoch, source, mark.length
            length, sent_s = self._awaited.get(source, (-1, 0.0))
            if mark.length == length:
                del self._awaited[source]
                wire_s = max(0.0, now - sent_s - mark.held_us / 1e6)
        self._frames.append(TracedFrame(now, candidates.ByteSize(), drafted, wire_s))

    def add_prefill(self, scheduled: ScheduledSequence, timing: StepTiming) -> None:
        """Counts a step that computed a piece of the prompt."""
        if not self._prefill_steps:
            self._prefill_s = timing.started
            self._cached = scheduled.computed
        self._prefill_steps += 1
        self._computing_s += timing.seconds

    def choose(self, result: RoundResult) -> RoundReason:
        """Decides whether the round has spans of its own."""
        scheduled, miss = result.scheduled, result.miss
        self.reason = self._chooser.choose(
            scheduled.base,
            result.idle_s + result.timing.seconds,
            0 if miss == verifier_pb2.MISS_CAUSE_NOT_WANTED else miss,
            rejected=bool(scheduled.selection) and not result.accepted,
        )
        if self.reason:
            self._chosen.add(scheduled.base)
        return self.reason

    def emit_round(self, result: RoundResult) -> int:
        """Emits the round's span, or adds it to its segment's. Returns the Unix nanoseconds at which the step ended."""
        scheduled, timing = result.scheduled, result.timing
        if self._prefill_steps or len(scheduled.pending) > 1 or self._opened_s < math.inf:
            self.add_prefill(scheduled, timing)
            self._emit_prefill(scheduled, timing)
        chosen = scheduled.selection
        frames = [frame for frame in self._frames if frame.at_s <= timing.started]
        self._frames = self._frames[len(frames) :]
        self._drafts = list(dict.fromkeys(frame.drafted for frame in frames if frame.drafted)) or self._drafts
        attributes: dict[str, Value] = {
            spans.DRAFTED: len(chosen),
            spans.ACCEPTED: result.accepted,
            spans.DEPTH: max(chosen.depths, default=0),
            spans.BUDGET: scheduled.session.request.max_draft_tokens,
            spans.FRAMES: len(frames),
            spans.BYTES: sum(frame.size for frame in frames),
            spans.WIRE: min((frame.wire_s for frame in frames if frame.wire_s is not None), default=None),
        }
        links = [self._draft_context(*names) for names in self._drafts] if len(chosen) else []
        if self.trace.segment_tokens:
            self._add_to_sum(scheduled, timing, attributes, links)
        if self.reason:
            self._emit_verify(timing, attributes, result.step_number, self.round_context(scheduled), links)
            self._under_way.append((scheduled, timing))
            self._emit_unreceived()
        return self.trace.at(timing.ended)

    def close(self, length: int) -> None:
        """The gateway has received `length` tokens, and closed the session."""
        self._received = length
        self._emit_unreceived()

    def _emit_unreceived(self) -> None:
        """Emits the `round` of what no gateway will: spans of this verifier and of drafters refer to it."""
        if self._received is None:
            return
        while self._under_way:
            scheduled, timing = self._under_way.popleft()
            if scheduled.base > self._received:
                epoch = scheduled.session.request.epoch
                attributes: dict[str, Value] = {spans.EPOCH: epoch, spans.LENGTH: scheduled.base}
                attributes |= {spans.DISCARDED: True, spans.REASON: REASONS[types_pb2.ROUND_REASON_FAILED]}
                context = self.trace.round(epoch, scheduled.base)
                self.trace.emit(Span(spans.ROUND, timing.started, timing.ended, attributes, context))

    def emit_sum(self) -> None:
        """Emits the span of the segment whose rounds came last."""
        if self._sum is not None:
            self.trace.emit(self._sum.span())
            self._sum = None

    def _add_to_sum(
        self,
        scheduled: ScheduledSequence,
        timing: StepTiming,
        attributes: Mapping[str, Value],
        drafts: Iterable[SpanContext],
    ) -> None:
        epoch = scheduled.session.request.epoch
        context = self.trace.segment(epoch, scheduled.base)
        if self._sum is None or self._sum.context != context:
            self.emit_sum()
            self._sum = VerifySum(context, epoch, timing.started)
        self._sum.add(timing, attributes)
        self._sum.drafts.update((draft.span_id, draft) for draft in drafts)

    def _draft_context(self, epoch: int, source: int, length: int) -> SpanContext:
        """The drafter's span: of the segment, if the round has none of its own."""
        if self.trace.segment_tokens and length not in self._chosen:
            return self.trace.draft_segment(epoch, source, length)
        return self.trace.draft(epoch, source, length)

    def linked_context(self, scheduled: ScheduledSequence) -> SpanContext:
        """The span that a step refers to: that of the round, or of its segment."""
        if self.trace.segment_tokens:
            return self.trace.segment(scheduled.session.request.epoch, scheduled.base)
        return self.round_context(scheduled)

    def round_context(self, scheduled: ScheduledSequence) -> SpanContext:
        """Span of the sequence's round, cached because two spans refer to it."""
        place = scheduled.session.request.epoch, scheduled.base
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
        """The step's facts stand here: its own span is in another trace, which a collector mostly drops."""
        attributes[spans.STEP_NUMBER] = step_number
        attributes[spans.SESSIONS], attributes[spans.TOKENS] = timing.sessions, timing.tokens
        self.trace.emit(Span(spans.VERIFY, timing.started, timing.ended, attributes, parent=parent, links=links))

    def _emit_prefill(self, scheduled: ScheduledSequence, timing: StepTiming) -> None:
        """The last prefill step also decides the first token, so it is part of a round as well."""
        began = min(self._opened_s, self._prefill_s)
        attributes = {
            spans.EPOCH: scheduled.session.request.epoch,
            spans.TOKENS: scheduled.base,
            spans.CACHED: self._cached,
            spans.PASSES: self._prefill_steps,
            spans.QUEUE: self._prefill_s - began,
            spans.COMPUTE: self._computing_s,
        }
        self.trace.emit(Span(spans.PREFILL, began, timing.ended, attributes))
        self._opened_s, self._prefill_steps, self._computing_s = math.inf, 0, 0.0
