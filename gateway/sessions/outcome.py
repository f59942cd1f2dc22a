"""How sessions end: what a record says of it, the tokens that count, and what those who follow are told."""

from __future__ import annotations

from gateway.store.session_store import SessionRecord
from slipstream.errors import Aborted, Unavailable
from slipstream.v1 import gateway_pb2, verifier_pb2


def finished_of(record: SessionRecord) -> gateway_pb2.Finished:
    """Without a reason while the session goes on."""
    return gateway_pb2.Finished.FromString(record.outcome)


def output_of(record: SessionRecord) -> tuple[int, ...]:
    """The tokens that carry the session's text: of one that ended, none behind a stop string."""
    output = record.tokens[record.prompt_length :]
    return output[: finished_of(record).output_tokens] if record.outcome else output


def cancelled(record: SessionRecord) -> bytes:
    """The outcome of a session that is cancelled as its record stands."""
    reason = verifier_pb2.FINISH_REASON_CANCELLED
    return gateway_pb2.Finished(reason=reason, output_tokens=len(output_of(record))).SerializeToString()


def rolled_back(output_tokens: int | None = None) -> Aborted:
    """`output_tokens`: of what was told, those that are left."""
    left = "" if output_tokens is None else f" to {output_tokens} output tokens"
    return Aborted(f"The session was rolled back{left}; resume at what is left.", reason="ROLLED_BACK")


def suspended() -> Unavailable:
    return Unavailable("The gateway let the session go; resume it.", reason="SUSPENDED")
