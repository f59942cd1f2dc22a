"""Typed errors as HTTP answers: status, headers, and a body in the protocol's own shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slipstream.errors import Aborted, InvalidArgument, SlipstreamError, message_to_send, retry_delay_s, typed_error

ANTHROPIC_PATHS = "/v1/messages"
"""Paths that begin so have errors in Anthropic's shape; all others in OpenAI's."""
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {409: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error"}


class RequestTooLarge(InvalidArgument):
    http_status = 413


class RequestTimeout(InvalidArgument):
    http_status = 408


class MethodNotAllowed(InvalidArgument):
    http_status = 405


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error that is ready to be sent."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]


def http_error(exception: Exception, path: str, param: str | None = None) -> HttpError:
    """`param`: the field of the request that is wrong, where one is."""
    error = typed_error(exception)
    return HttpError(error.http_status, _headers(error), _body(error, path, param))


def _headers(error: SlipstreamError) -> dict[str, str]:
    wait_s = retry_delay_s(error)
    if wait_s is not None:
        return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}
    # Clients retry 408, 409 and 429 by themselves; these errors do not pass with time.
    final = isinstance(error, (Aborted, RequestTimeout)) or error.http_status == 429
    return {"x-should-retry": "false"} if final else {}


def _body(error: SlipstreamError, path: str, param: str | None) -> dict[str, Any]:
    message, status = message_to_send(error), error.http_status
    if path.startswith(ANTHROPIC_PATHS):
        return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}}
    kind = _OPENAI_TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}
