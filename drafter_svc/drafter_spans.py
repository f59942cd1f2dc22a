"""Spans of a traced session: one `draft` span for the time in which the drafter held one committed length.

That is the round during which it drafted, not the one that verifies its candidates: what it does while its verifier is
busy stands beside that verification, and the commit that ends the round shows what became of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanContext

from slipstream.proposers.draft_tree import DraftNode, DraftTree
from slipstream.proposers.drafting.session import DraftSession, DraftSessionObserver
from slipstream.rpc import proto_conversion
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Span, Trace, Value
from slipstream.v1 import types_pb2


@dataclass(slots=True)
class DraftWork:
    """Work for a session in one round, or in the rounds of one segment."""

    length: int
    """Committed tokens before it."""
    began_s: float = math.inf
    """Monotonic seconds, as `ended_s`; infinite while nothing was drafted."""
    ended_s: float = 0.0
    rounds: int = 0
    passes: int = 0
    drafted: int = 0
    sent: int = 0
    size: int = 0
    dropped: int = 0
    computing_s: float = 0.0

    def note(self, began_s: float, ended_s: float) -> None:
        self.began_s, self.ended_s = min(self.began_s, began_s), max(self.ended_s, ended_s)

    def add(self, round: DraftWork, dropped: int) -> None:
        self.note(round.began_s, round.ended_s)
        self.rounds += 1
        self.passes += round.passes
        self.drafted += round.drafted
        self.sent += round.sent
        self.size += round.size
        self.dropped += dropped
        self.computing_s += round.computing_s

    def attributes(self) -> dict[str, Value]:
        return {
            spans.LENGTH: self.length,
            spans.PASSES: self.passes,
            spans.DRAFTED: self.drafted,
            spans.SENT: self.sent,
            spans.BYTES: self.size,
            spans.COMPUTE: self.computing_s,
        }


class DraftTrace(DraftSessionObserver):
    """The spans of one opening of a session."""

    def __init__(self, trace: Trace, session: DraftSession, drafter: str) -> None:
        """`drafter`: the name by which requests choose it."""
        self._trace = trace
        self._session = session
        self._drafter = drafter
        self._names: dict[str, Value] = {spans.DRAFTER: drafter, spans.EPOCH: session.epoch}
        self._epoch = session.epoch
        self._sum: DraftWork | None = None
        self._begin(len(session.tokens))

    def step_ended(self, began_s: float, ended_s: float, proposed: int, sent: int) -> None:
        """A step that a commit came into counts from the commit on: the part before it stands in no span."""
        began_s, ended_s = max(began_s, self._since_s), max(ended_s, self._since_s)
        self._round.note(began_s, ended_s)
        self._round.passes += 1
        self._round.drafted += proposed
        self._round.computing_s += ended_s - began_s

    def mark(self) -> types_pb2.DraftMark:
        """The round during which candidates that are sent now were drafted, for the verifier's spans."""
        now = self._trace.now()
        self._round.note(now, now)
        held_us = proto_conversion.microseconds(now - self._since_s)
        return types_pb2.DraftMark(length=self._round.length, held_us=held_us)

    def candidates_sent(self, count: int, size: int) -> None:
        """`size`: bytes of their frame."""
        self._round.sent += count
        self._round.size += size

    def tokens_committed(self, token_ids: Sequence[int], *, traced: bool = False) -> None:
        """Ends the round: `token_ids` are what it committed. `traced`: it has spans of its own."""
        tree, length = self._session.tree, self._round.length
        agreed, left = _outlook(tree, token_ids)
        dropped = tree.node_count - agreed - left
        if self._trace.segment_tokens:
            self._add_to_sum(dropped)
        if traced or not self._trace.segment_tokens:
            self._send(dropped, dropped > 0 and not left, self._trace.round(self._epoch, length))
        self._begin(length + len(token_ids))

    def drafting_ended(self) -> None:
        """No round takes what there is: it is discarded."""
        if self._sum is None:
            self._send(self._session.tree.node_count, True)
        else:  # it belongs to the last segment: of the next one there may be no round
            self._sum.add(self._round, self._session.tree.node_count)
            self._emit_sum()
        self._begin(self._round.length)

    def _add_to_sum(self, dropped: int) -> None:
        length, tokens = self._round.length, self._trace.segment_tokens
        if self._sum is None or self._sum.length // tokens != length // tokens:
            self._emit_sum()
            self._sum = DraftWork(length)
        self._sum.add(self._round, dropped)

    def _emit_sum(self) -> None:
        done, self._sum = self._sum, None
        if done is None or done.began_s == math.inf:
            return
        attributes = self._names | done.attributes() | {spans.ROUNDS: done.rounds, spans.DROPPED: done.dropped}
        context = self._trace.draft_segment(self._epoch, self._session.number, done.length)
        parent = self._trace.segment(self._epoch, done.length)
        self._emit(spans.DRAFT_SUM, done, attributes, context, parent)

    def _begin(self, length: int) -> None:
        self._round, self._since_s = DraftWork(length), self._trace.now()

    def _send(self, dropped: int, discarded: bool, parent: SpanContext | None = None) -> None:
        done = self._round
        if done.began_s == math.inf:
            return
        attributes = self._names | done.attributes() | {spans.DROPPED: dropped, spans.DISCARDED: discarded}
        context = self._trace.draft(self._epoch, self._session.number, done.length)
        self._emit(spans.DRAFT, done, attributes, context, parent)

    def _emit(
        self,
        name: str,
        done: DraftWork,
        attributes: Mapping[str, Value],
        context: SpanContext,
        parent: SpanContext | None,
    ) -> None:
        """The drafter is part of the span's name: pages of traces show names alone, and several drafters have a row
        each."""
        shown = f"{spans.DRAFT} {self._drafter}" + name.removeprefix(spans.DRAFT)
        named = {**attributes, spans.NAME: name}
        self._trace.emit(Span(shown, done.began_s, done.ended_s, named, context, parent))


def _outlook(tree: DraftTree, token_ids: Sequence[int]) -> tuple[int, int]:
    """(leading tokens that the tree holds, nodes that it keeps below all of them)"""
    node: DraftNode | None = tree.root
    for agreed, token in enumerate(token_ids):
        node = node.children.get(token) if node is not None else None
        if node is None:
            return agreed, 0
    below, waiting = 0, [node]
    while waiting:
        children = [child for each in waiting if each is not None for child in each.children.values()]
        below, waiting = below + len(children), list(children)
    return len(token_ids), below
