"""How a record ends: the last word of its session, and the tokens that count."""

from __future__ import annotations

from gateway.store.record import Record
from slipstream.v1 import gateway_pb2, verifier_pb2


def finished_of(record: Record) -> gateway_pb2.Finished:
    """Without a reason while the session goes on."""
    return gateway_pb2.Finished.FromString(record.outcome)


def output_of(record: Record) -> tuple[int, ...]:
    """The tokens that carry the session's text: of one that ended, none behind a stop string."""
    output = record.tokens[record.prompt_length :]
    return output[: finished_of(record).output_tokens] if record.outcome else output


def cancelled(record: Record) -> bytes:
    """The outcome of a session that is cancelled as its record stands."""
    reason = verifier_pb2.FINISH_REASON_CANCELLED
    return gateway_pb2.Finished(reason=reason, output_tokens=len(output_of(record))).SerializeToString()
