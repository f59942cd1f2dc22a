"""One tree of exceptions. Each class names its gRPC status code and its HTTP status.

    SlipstreamError
    ├── InvalidArgument      the request can never work; its sender must change it
    ├── NotFound             no such session, model or drafter
    ├── FailedPrecondition   parts that do not fit together (vocabularies, models, configuration)
    ├── Unauthenticated      the caller sent no valid credentials
    ├── PermissionDenied     the caller, or a drafter, lacks the role or the trust that is needed
    ├── ResourceExhausted    no room now; try later or smaller
    ├── Aborted              fenced: another owner has the session under a higher epoch
    ├── OutOfRange           a length or position that does not exist
    ├── Unavailable          a peer or the store does not answer; retry
    ├── DeadlineExceeded     the remaining time ran out
    └── Internal             a bug or broken numbers; never the caller's fault

A message is a sentence with the remedy in it. `reason` is a stable word for programs (`ErrorInfo.reason`), `field` the
part of the request that is wrong, `numbers` the numbers of the sentence, such as a limit.

What a server of any protocol sends for an exception: `typed_error`, `message_to_send`, `retry_delay_s`.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any, ClassVar

import grpc

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds until a retry, for errors that carry no better value."""
MAX_ERROR_BYTES = 1024
"""Bytes of an error's sentence that are sent. It may quote the caller, and travels as metadata, which is limited."""

# Reasons that one service sends and another one acts on.
LINK_LOST = "LINK_LOST"
"""Reason of a drafter's failure after which the session stays attached: it is opened again once the link is back."""
DRAINING = "DRAINING"
"""The verifier is about to end: open the session on another one."""
OTHER_ARITHMETIC = "OTHER_ARITHMETIC"
"""The verifier computes otherwise than the one that the session was to be opened on: choose again."""
ARITHMETIC_GONE = "ARITHMETIC_GONE"
"""No verifier is left of the arithmetic that wrote a session's text so far."""
SERVING_ENDED = "SERVING_ENDED"
"""The gateway ends, and no other takes its place: resuming there is of no use."""
KV_TOO_SMALL = "KV_TOO_SMALL"
"""The one reason of RESOURCE_EXHAUSTED that does not pass with time."""

GRAMMAR_TOO_COSTLY = "GRAMMAR_TOO_COSTLY"
"""The masks of a session's grammar took more time than a session may cost: it ends, on every verifier."""
STEP_FAILED = "STEP_FAILED"
"""The verifier's model could run no pass: open the session on another verifier, or after a pause on this one."""
SESSION_FAULT = "SESSION_FAULT"
"""Every pass with this session failed, others ran: it ends."""
DEVICE_MEMORY = "DEVICE_MEMORY"
"""A pass with this session alone needs more memory than the verifier's device has."""

# Reasons of INVALID_ARGUMENT that belong to no single field.
BAD_COMMAND = "BAD_COMMAND"
"""Another role's command or frame breaks the contract between services."""
FIELD_INVALID = "FIELD_INVALID"
"""A value has another type, or another shape, than the field."""
FIELD_MISSING = "FIELD_MISSING"
"""A field is needed that was not sent."""
FIELDS_CONFLICT = "FIELDS_CONFLICT"
"""Two fields exclude each other."""
NOT_PROTOBUF = "NOT_PROTOBUF"
"""A message is no protobuf of this contract."""
PROTOCOL = "PROTOCOL"
"""A drafter's frame of candidates, or a verifier's round, is invalid."""
NOT_UNICODE = "NOT_UNICODE"
"""A text holds what is no Unicode."""
MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
"""A message, or an item of a stream, is larger than what its receiver takes."""
NUMBER_OUT_OF_RANGE = "NUMBER_OUT_OF_RANGE"
"""A number is outside the range that its field has (`least`, `most`)."""
TOO_MANY_ITEMS = "TOO_MANY_ITEMS"
"""A list, or a map, has more items than its field may have (`limit`)."""
VALUE_UNKNOWN = "VALUE_UNKNOWN"
"""A word or a number of an enumeration names nothing that this server has."""

CONTROL_FLOW = (KeyboardInterrupt, SystemExit, CancelledError, GeneratorExit)
"""Exceptions that are no faults. Any other BaseException may be a native library's (pyo3's PanicException)."""

# Which side a status blames. Traces follow OpenTelemetry's conventions, by which RESOURCE_EXHAUSTED is the caller's
# error; for the operator's objectives it is a request that the service did not serve.
SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses with which a span's server has failed."""
UNSERVED = SERVER_ERRORS | {grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Statuses that count against the service, not against the request."""


class SlipstreamError(Exception):
    """The root; never raised itself."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_s: float | None = None,
        field: str = "",
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code.name
        self.retry_s = retry_s
        """Seconds after which a retry may work, where they are known."""
        self.field = field
        """Path of the request's field that is wrong, by its names in the protos; empty: no single one is."""
        self.numbers: Mapping[str, float] = numbers or {}
        """By name: what was sent, what is allowed (`limit`, or `least` and `most`), what is left."""


class InvalidArgument(SlipstreamError):
    code, http_status = grpc.StatusCode.INVALID_ARGUMENT, 400


class NotFound(SlipstreamError):
    code, http_status = grpc.StatusCode.NOT_FOUND, 404


class FailedPrecondition(SlipstreamError):
    code, http_status = grpc.StatusCode.FAILED_PRECONDITION, 400


class Unauthenticated(SlipstreamError):
    code, http_status = grpc.StatusCode.UNAUTHENTICATED, 401


class PermissionDenied(SlipstreamError):
    code, http_status = grpc.StatusCode.PERMISSION_DENIED, 403


class ResourceExhausted(SlipstreamError):
    code, http_status = grpc.StatusCode.RESOURCE_EXHAUSTED, 429


class Aborted(SlipstreamError):
    code, http_status = grpc.StatusCode.ABORTED, 409


class OutOfRange(SlipstreamError):
    code, http_status = grpc.StatusCode.OUT_OF_RANGE, 400


class Unavailable(SlipstreamError):
    code, http_status = grpc.StatusCode.UNAVAILABLE, 503


class DeadlineExceeded(SlipstreamError):
    code, http_status = grpc.StatusCode.DEADLINE_EXCEEDED, 504


class Internal(SlipstreamError):
    code, http_status = grpc.StatusCode.INTERNAL, 500


_BY_CODE: dict[int, type[SlipstreamError]] = {kind.code.value[0]: kind for kind in SlipstreamError.__subclasses__()}


def from_code(code: int, message: str, reason: str, **more: Any) -> SlipstreamError:
    """The exception for a numeric gRPC status code (google.rpc.Code), as it travels inside frames. `more`: what else
    SlipstreamError takes."""
    return _BY_CODE.get(code, Internal)(message, reason=reason, **more)


def code_number(error: SlipstreamError) -> int:
    """The numeric gRPC status code of an exception, as it travels inside frames."""
    number: int = error.code.value[0]
    return number


def typed_error(exception: Exception) -> SlipstreamError:
    """The error to send for an exception: a SlipstreamError itself; for any other one, which is logged, an Internal
    that quotes nothing of it."""
    if isinstance(exception, SlipstreamError):
        return exception
    log.error("unexpected exception in a handler", exc_info=exception)
    return Internal("an internal error happened; please report it with the time it happened at.")


def message_to_send(error: SlipstreamError) -> str:
    """The error's sentence in at most MAX_ERROR_BYTES of UTF-8."""
    return error.message.encode("utf-8", "replace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore")


def retry_delay_s(error: SlipstreamError) -> float | None:
    """Seconds after which the caller may retry; None for an error that does not pass with time."""
    if not isinstance(error, (ResourceExhausted, Unavailable)) or error.reason == KV_TOO_SMALL:
        return None
    return RETRY_S if error.retry_s is None else error.retry_s
