"""Spans of a traced session: one `draft` span for the time in which the drafter held one committed length.

That is the round during which it drafted, not the one that verifies its candidates: what it does while its verifier is
busy stands beside that verification, and the commit that ends the round shows what became of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from opentelemetry.trace import SpanContext

from drafter_svc.session import DraftSession, SessionObserver
from slipstream.proposers.draft_tree import DraftNode, DraftTree
from slipstream.rpc import proto_conversion
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Span, Trace, Value
from slipstream.v1 import types_pb2


class DraftTrace(SessionObserver):
    """The spans of one opening of a session."""

    def __init__(self, trace: Trace, session: DraftSession, drafter: str) -> None:
        """`drafter`: the name by which requests choose it."""
        self._trace = trace
        self._session = session
        self._drafter = drafter
        self._epoch = session.epoch
        self._begin(len(session.tokens))

    def nodes_proposed(self, began_s: float, ended_s: float, count: int) -> None:
        self._note_work(max(began_s, self._since_s), ended_s)
        self._steps += 1
        self._drafted += count
        self._computing_s += ended_s - began_s

    def candidates_sent(self, candidates: types_pb2.Candidates) -> None:
        """Marks them with the round during which they were drafted, for the verifier's spans."""
        now = self._trace.now()
        candidates.mark.length = self._length
        candidates.mark.held_us = proto_conversion.microseconds(now - self._since_s)
        self._note_work(now, now)
        self._sent_nodes += len(candidates.token_ids)
        self._bytes += candidates.ByteSize()

    def tokens_committed(self, token_ids: Sequence[int]) -> None:
        """Ends the round: `token_ids` are what it committed."""
        tree = self._session.tree
        agreed, left = _outlook(tree, token_ids)
        dropped = tree.node_count - agreed - left
        self._send(dropped, dropped > 0 and not left, self._trace.round(self._epoch, self._length))
        self._begin(self._length + len(token_ids))

    def drafting_ended(self) -> None:
        """No round takes what there is: it is discarded."""
        self._send(self._session.tree.node_count, True)
        self._begin(self._length)

    def _begin(self, length: int) -> None:
        self._length = length
        self._since_s = self._last_s = self._trace.now()
        self._first_s = math.inf
        self._steps = self._drafted = self._sent_nodes = self._bytes = 0
        self._computing_s = 0.0

    def _note_work(self, began_s: float, ended_s: float) -> None:
        self._first_s = min(self._first_s, began_s)
        self._last_s = max(self._last_s, ended_s)

    def _send(self, dropped: int, discarded: bool, parent: SpanContext | None = None) -> None:
        if self._first_s == math.inf:
            return
        attributes: dict[str, Value] = {
            spans.DRAFTER: self._drafter,
            spans.EPOCH: self._epoch,
            spans.LENGTH: self._length,
            spans.PASSES: self._steps,
            spans.DRAFTED: self._drafted,
            spans.TOLD: self._sent_nodes,
            spans.BYTES: self._bytes,
            spans.DROPPED: dropped,
            spans.DISCARDED: discarded,
            spans.COMPUTE: self._computing_s,
        }
        context = self._trace.draft(self._epoch, self._session.number, self._length)
        self._trace.emit(Span(spans.DRAFT, self._first_s, self._last_s, attributes, context, parent))


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
