"""Typed errors as HTTP answers: status, headers, and a body in the protocol's own shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import (
    Aborted,
    InvalidArgument,
    SlipstreamError,
    message_to_send,
    retry_delay_s,
    typed_error,
)

ANTHROPIC = "Anthropic"
"""Tag of the routes whose errors have Anthropic's shape; those of all others have OpenAI's."""
ANTHROPIC_PATHS = "/v1/messages"
"""Paths that begin so belong to such a route, if to any."""
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
_OPENAI_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded"}
"""Codes that OpenAI's clients act on; all others are the reason."""
_PARAMS = {
    "chat.template_variables_json": "chat_template_kwargs",
    "chat.messages": "prompt",
    "prompt_token_ids": "prompt",
    "structured_output": "",
}
"""The field of HTTP requests that one of gRPC stands for. Which of several a structured output came in, its error does
not say."""
_INPUTS = {
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/tokenize": "messages",
}
"""Field that holds the prompt, in other requests."""
_ANTHROPIC_BEGINNINGS = {"PROMPT_TOO_LONG": "prompt is too long: "}
"""By which Anthropic's clients know an error: it has no code there."""
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


def http_error(exception: Exception, scope: Mapping[str, Any], param: str | None = None) -> HttpError:
    """The error in the shape of the request's protocol. `scope`: the request's, in ASGI. `param`: the field that is
    wrong, where one is."""
    error = typed_error(exception)
    body = _anthropic_body(error) if is_anthropic(scope) else _openai_body(error, param or _param(error, scope["path"]))
    return HttpError(error.http_status, _headers(error), body)


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """True for a route of Anthropic's protocol; where there is no route, or it is not known yet, the path decides."""
    route = scope.get("route")
    return scope["path"].startswith(ANTHROPIC_PATHS) if route is None else ANTHROPIC in route.tags


def _headers(error: SlipstreamError) -> dict[str, str]:
    wait_s = retry_delay_s(error)
    if wait_s is not None:
        return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}
    # Clients retry 408, 409 and 429 by themselves; these errors do not pass with time.
    final = isinstance(error, (Aborted, RequestTimeout)) or error.http_status == 429
    return {"x-should-retry": "false"} if final else {}


def _anthropic_body(error: SlipstreamError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    message = _ANTHROPIC_BEGINNINGS.get(error.reason, "") + message_to_send(error)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _param(error: SlipstreamError, path: str) -> str | None:
    """The field that is wrong, as requests at this path name it."""
    field = _PARAMS.get(error.field, error.field.removeprefix("sampling.").removeprefix("chat."))
    return (_INPUTS.get(path, field) if field == "prompt" else field) or None


def _openai_body(error: SlipstreamError, param: str | None) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(error.http_status, "server_error")
    code = _OPENAI_CODES.get(error.reason, error.reason.lower())
    return {"error": {"message": message_to_send(error), "type": kind, "param": param, "code": code}}
