"""Which arithmetic wrote which of a session's output tokens, as its record keeps it (`StoredRequest.arithmetics`).

A session whose text was begun by one arithmetic goes on with that one alone: another would continue a text that it
would not have written. A span is in the record before a verifier of its arithmetic writes its first token, so a span
may have no tokens yet; such a one decides nothing. Records older than the field have no spans and get none: their
sessions go on anywhere, as they were begun. All functions are pure; `length` counts output tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.v1 import gateway_pb2

MOST_SPANS = 16
"""Spans in a record: of more, those in the middle are forgotten."""


@dataclass(frozen=True, slots=True)
class WrittenSpan:
    arithmetic: str
    """Empty where none is chosen yet."""
    offset: int
    """Output tokens before it."""


Spans = tuple[WrittenSpan, ...]


def spans_of(params: bytes) -> Spans:
    """Those of a record's request."""
    stored = gateway_pb2.StoredRequest.FromString(params)
    return tuple(WrittenSpan(each.arithmetic, each.offset) for each in stored.arithmetics)


def moves_of(params: bytes) -> int:
    """Epochs of a record that began because its gateway moved it."""
    return gateway_pb2.StoredRequest.FromString(params).moves


def with_spans(params: bytes, spans: Iterable[WrittenSpan], moves: int = 0) -> bytes:
    """The request with these spans and moves instead of its own."""
    stored = gateway_pb2.StoredRequest.FromString(params)
    del stored.arithmetics[:]
    stored.arithmetics.extend(messages(spans))
    stored.moves = moves
    return stored.SerializeToString(deterministic=True)


def messages(spans: Iterable[WrittenSpan]) -> list[gateway_pb2.ArithmeticSpan]:
    return [gateway_pb2.ArithmeticSpan(arithmetic=each.arithmetic, offset=each.offset) for each in spans]


def same_request(first: bytes, second: bytes) -> bool:
    """Whether two records have one request, whatever computes it: a session that was rolled back has another."""
    return first == second or with_spans(first, ()) == with_spans(second, ())


def chosen(arithmetic: str) -> Spans:
    """Those of a new session that is about to be opened on a verifier of this arithmetic; empty: none is chosen yet."""
    return (WrittenSpan(arithmetic, 0),)


def written(spans: Spans, length: int) -> Spans:
    """The spans with tokens."""
    return tuple(each for each in spans if each.arithmetic and each.offset < length)


def opened(spans: Spans, length: int, arithmetic: str) -> Spans:
    """The spans of a session that is opened behind `length` tokens on a verifier of this arithmetic."""
    if not spans:
        return ()
    before = written(spans, length)
    if before and before[-1].arithmetic == arithmetic:
        return before
    return (*before[:1], *before[1:][-(MOST_SPANS - 2) :], WrittenSpan(arithmetic, length))


def cut(spans: Spans, length: int, edit: int) -> Spans:
    """The spans of a session that is rolled back to `length` tokens, with `edit` of the client's behind them."""
    if not spans:
        return ()
    return written(spans, length) or (WrittenSpan("", length + edit),)


def wanted(spans: Sequence[WrittenSpan]) -> str:
    """The arithmetic that goes on with these spans; empty: any."""
    return spans[-1].arithmetic if spans else ""
