"""One tree of exceptions. Every one maps to one gRPC status code, in one interceptor
(`slipstream.rpc.status_interceptor`).

    SlipstreamError
    ├── InvalidArgument      the request can never work; its sender must change it
    ├── NotFound             no such session, model or drafter
    ├── FailedPrecondition   parts that do not fit together (vocabularies, models, configuration)
    ├── Unauthenticated      the caller did not say who it is, or is nobody
    ├── PermissionDenied     a rule that needs trust was asked of somebody untrusted
    ├── ResourceExhausted    no room now; try later or smaller
    ├── Aborted              fenced: somebody with a higher epoch owns the session
    ├── OutOfRange           a length or position that does not exist
    ├── Unavailable          a peer or the store is away; retry
    ├── DeadlineExceeded     the remaining time ran out
    └── Internal             a bug or broken numbers; never the caller's fault

A message is a sentence that says what to do. `reason` is a stable word for programs (`ErrorInfo.reason`).
"""

from __future__ import annotations

from typing import ClassVar

import grpc

# Reasons that one service gives and another one acts on.
LINK_LOST = "LINK_LOST"
"""Of a drafter's event after which the session stays attached: it is opened again as soon as the link is back."""
DRAINING = "DRAINING"
"""The verifier is about to end: open the session on another one."""
KV_TOO_SMALL = "KV_TOO_SMALL"
"""The one reason of RESOURCE_EXHAUSTED that does not pass with time."""

# Whose fault a status is. Traces follow OpenTelemetry's conventions, by which whoever asks for more than there is room
# for has made the error; to the operator's objectives that is one more request that the service did not serve.
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
"""Statuses of which a span says that its server failed."""
UNSERVED = SERVER_ERRORS | {grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Statuses of a request that say something of the service, and not of the request."""


class SlipstreamError(Exception):
    """The root; never raised itself."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, reason: str = "", retry_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code.name
        self.retry_s = retry_s
        """When it may work, where that is known."""


class InvalidArgument(SlipstreamError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(SlipstreamError):
    code = grpc.StatusCode.NOT_FOUND


class FailedPrecondition(SlipstreamError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(SlipstreamError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(SlipstreamError):
    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(SlipstreamError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Aborted(SlipstreamError):
    code = grpc.StatusCode.ABORTED


class OutOfRange(SlipstreamError):
    code = grpc.StatusCode.OUT_OF_RANGE


class Unavailable(SlipstreamError):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(SlipstreamError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Internal(SlipstreamError):
    code = grpc.StatusCode.INTERNAL


_BY_CODE: dict[int, type[SlipstreamError]] = {kind.code.value[0]: kind for kind in SlipstreamError.__subclasses__()}


def from_code(code: int, message: str, reason: str = "") -> SlipstreamError:
    """The exception for a numeric gRPC status code (google.rpc.Code), as it travels inside frames."""
    return _BY_CODE.get(code, Internal)(message, reason=reason)


def code_number(error: SlipstreamError) -> int:
    """The numeric gRPC status code of an exception, as it travels inside frames."""
    number: int = error.code.value[0]
    return number
