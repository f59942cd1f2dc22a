"""What a verifier tells of a traced session: its prompt read, its candidates verified, and the steps it shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.trace import SpanContext

from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Span, Trace, Tracing, Value
from slipstream.v1 import types_pb2

if TYPE_CHECKING:
    from verifier_svc.execution.embedded import ScheduledSequence
    from verifier_svc.scheduling.planner import StepPlan
    from verifier_svc.scheduling.step_result import RoundResult, StepTiming


MOST_TOLD = 64


class TracedFrame(NamedTuple):
    """Candidates that came."""

    at_s: float
    size: int
    """Bytes."""
    draft: SpanContext | None
    """Whose; None: of a drafter that traces nothing."""
    wire_s: float | None


class VerifyTrace:
    """Of one session; asked by the loop for what is over."""

    def __init__(self, trace: Trace, opened_s: float) -> None:
        """`opened_s`: on the loop's monotonic clock, as all moments here."""
        self.trace = trace
        self._opened_s = opened_s
        self._reading_s = math.inf
        """When the first piece of its prompt was read."""
        self._pieces = 0
        self._computing_s = 0.0
        self._cached = 0
        self._told: dict[int, tuple[int, float]] = {}
        """When each drafter, by its number, was told of which length; until its candidates on it came."""
        self._frames: list[TracedFrame] = []
        """That came since the last step began."""
        self._drafts: list[SpanContext] = []
        """Whose candidates were the last to come before it."""
        self._round: tuple[tuple[int, int], SpanContext] | None = None

    def told(self, number: int, length: int, now: float) -> None:
        """A drafter is told of the committed prefix."""
        self._told[number] = length, now
        if len(self._told) > MOST_TOLD:  # of drafters that were opened again and never answered
            del self._told[next(iter(self._told))]

    def arrived(self, number: int, candidates: types_pb2.Candidates, now: float) -> None:
        """A drafter's frame was grafted."""
        draft = wire_s = None
        if candidates.HasField("mark"):
            mark = candidates.mark
            draft = self.trace.draft(candidates.epoch, number, mark.length)
            length, told_s = self._told.get(number, (-1, 0.0))
            if mark.length == length:
                del self._told[number]
                wire_s = max(0.0, now - told_s - mark.held_us / 1e6)
        self._frames.append(TracedFrame(now, candidates.ByteSize(), draft, wire_s))

    def read(self, turn: ScheduledSequence, timing: StepTiming) -> None:
        """A step took in a piece of the prompt."""
        if not self._pieces:
            self._reading_s = timing.started
            self._cached = turn.computed
        self._pieces += 1
        self._computing_s += timing.seconds

    def verified(self, result: RoundResult, step: int) -> int:
        """Unix nanoseconds when the step ended, for whoever sends the round."""
        turn, timing = result.turn, result.timing
        if self._pieces or len(turn.pending) > 1 or self._opened_s < math.inf:
            self.read(turn, timing)
            self._prefilled(turn, timing)
        chosen = turn.selection
        came = [frame for frame in self._frames if frame.at_s <= timing.started]
        self._frames = self._frames[len(came) :]
        drafts = {frame.draft.span_id: frame.draft for frame in came if frame.draft is not None}
        self._drafts = [*drafts.values()] or self._drafts
        attributes: dict[str, Value] = {
            spans.DRAFTED: len(chosen),
            spans.ACCEPTED: result.accepted,
            spans.DEPTH: max(chosen.depths, default=0),
            spans.BUDGET: turn.session.max_draft_tokens,
            spans.FRAMES: len(came),
            spans.BYTES: sum(frame.size for frame in came),
            spans.WIRE: min((frame.wire_s for frame in came if frame.wire_s is not None), default=None),
        }
        self._emit(timing, attributes, step, self.round(turn), self._drafts if len(chosen) else ())
        return self.trace.at(timing.ended)

    def round(self, turn: ScheduledSequence) -> SpanContext:
        """The turn's; asked for twice of each."""
        place = turn.session.epoch, turn.base
        if self._round is None or self._round[0] != place:
            self._round = place, self.trace.round(*place)
        return self._round[1]

    def void(self, turn: ScheduledSequence, timing: StepTiming, step: int) -> None:
        """A step was for nothing: the session was closed or rolled back meanwhile."""
        if turn.complete:
            self._emit(timing, {spans.DRAFTED: len(turn.selection), spans.DISCARDED: True}, step)
        else:
            self.read(turn, timing)
            self._prefilled(turn, timing)

    def _emit(
        self,
        timing: StepTiming,
        attributes: dict[str, Value],
        step: int,
        parent: SpanContext | None = None,
        links: Sequence[SpanContext] = (),
    ) -> None:
        step_span = self.trace.tracing.step(step)
        self.trace.emit(
            Span(spans.VERIFY, timing.started, timing.ended, attributes, parent=parent, links=(step_span, *links))
        )

    def _prefilled(self, turn: ScheduledSequence, timing: StepTiming) -> None:
        """The last step of a prompt says its first token: round and prefill have it both."""
        began = min(self._opened_s, self._reading_s)
        attributes = {
            spans.EPOCH: turn.session.epoch,
            spans.TOKENS: turn.base,
            spans.CACHED: self._cached,
            spans.PASSES: self._pieces,
            spans.QUEUE: self._reading_s - began,
            spans.COMPUTE: self._computing_s,
        }
        self.trace.emit(Span(spans.PREFILL, began, timing.ended, attributes))
        self._opened_s, self._pieces, self._computing_s = math.inf, 0, 0.0


def stepped(tracing: Tracing, number: int, plan: StepPlan, timing: StepTiming) -> None:
    """The step itself, if a traced session was in it."""
    rounds = [turn.session.trace.round(turn) for turn in plan.turns if turn.session.trace is not None and turn.complete]
    if rounds:
        trace = tracing.alone(tracing.step(number))
        attributes: dict[str, Value] = {
            spans.INDEX: number,
            spans.SESSIONS: len(plan.turns),
            spans.TOKENS: sum(turn.tokens for turn in plan.turns),
            spans.DRAFTED: sum(len(turn.selection) for turn in plan.turns),
            spans.BUBBLE: timing.waited,
        }
        trace.emit(Span(spans.STEP, timing.started, timing.ended, attributes, context=trace.root, links=rounds))
