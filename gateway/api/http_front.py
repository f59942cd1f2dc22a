"""All HTTP protocols of a gateway as one application, and its server."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from gateway.api.anthropic import messages
from gateway.api.http import operations, route_list
from gateway.api.http.body import BodyLimits, BodyReader
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import REQUEST_ID, Application, Entry, local_hosts
from gateway.api.http.errors import MethodNotAllowed, http_error
from gateway.api.http.server import HttpServer, ServerLimits
from gateway.api.openai import chat, completions, models, responses
from gateway.api.openai.fields import SpeculationField
from gateway.api.playground import routes as playground
from gateway.auth.api_keys import ApiKeys
from gateway.auth.tenant import Tenant
from gateway.config import BESIDES_BYTES, BODY_FACTOR
from slipstream.client.completion import TRACE_ID
from slipstream.errors import (
    FIELD_INVALID,
    FIELD_MISSING,
    NUMBER_OUT_OF_RANGE,
    TOO_MANY_ITEMS,
    VALUE_UNKNOWN,
    InvalidArgument,
    NotFound,
    SlipstreamError,
)
from slipstream.rpc.tls import Certificates
from slipstream.version import running_version

COUNTING = frozenset({"/tokenize", "/detokenize"})
"""Paths of requests whose text no model reads."""
CONNECTIONS_A_SESSION = 4
SPARE_CONNECTIONS = 256
_MOST_NAMED = 64
"""Characters of an unknown field's name that are sent back."""
_KIND = re.compile(r"(str|int|float|bool|(list|dict|function-[a-z]+|constrained-[a-z]+|literal|nullable)\[.*\])")
"""Names by which pydantic distinguishes the kinds of one field."""
_REASONS = {
    "missing": FIELD_MISSING,
    "enum": VALUE_UNKNOWN,
    "literal_error": VALUE_UNKNOWN,
    "too_long": TOO_MANY_ITEMS,
    **dict.fromkeys(("greater_than", "greater_than_equal", "less_than", "less_than_equal"), NUMBER_OUT_OF_RANGE),
    "finite_number": NUMBER_OUT_OF_RANGE,
}
"""Our reasons by the types of pydantic's faults; all other types are FIELD_INVALID."""
_ROUTES = (
    operations.routes,
    route_list.routes,
    completions.routes,
    chat.routes,
    responses.routes,
    messages.routes,
    models.routes,
    playground.routes,
)


def http_server(parts: HttpDependencies, keys: ApiKeys | None, certificates: Certificates | None) -> HttpServer:
    """The server of all HTTP protocols; it does not listen yet."""
    config = parts.config
    connections = CONNECTIONS_A_SESSION * config.max_sessions + SPARE_CONNECTIONS
    limits = ServerLimits(connections=connections, idle_s=config.http_idle_s)
    return HttpServer(application(parts, keys), certificates, limits)


def application(parts: HttpDependencies, keys: ApiKeys | None) -> Application:
    app = FastAPI(
        title="Slipstream",
        version=running_version(),
        openapi_url=None,  # `route_list` has a route of its own
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Its logs would hold what validation quotes; a gateway has its own traces.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        responses={"4XX": {"description": "The request is wrong."}, "5XX": {"description": "Try again."}},
    )
    for routes in _ROUTES:
        app.include_router(routes(parts))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    app.add_exception_handler(SlipstreamError, _failed)
    config = parts.config
    limits = BodyLimits(_body_bytes(config.max_prompt_bytes), config.max_prompt_bytes, config.http_idle_s)
    bodies = BodyReader(limits, parts.work, partial(_most_bytes, parts))
    hosts = local_hosts(config.http, config.http_origins, config.http_hosts) if keys is None else None
    entry: Application = Entry(app, keys, bodies, hosts)
    if config.http_origins:  # around the entry: browsers ask without a key whether they may ask
        allowed: Any = {"allow_origins": config.http_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        allowed["expose_headers"] = [REQUEST_ID, "retry-after", "retry-after-ms", TRACE_ID]
        entry = CORSMiddleware(entry, **allowed)
    return entry


def _body_bytes(text_bytes: int) -> int:
    """Most bytes of a body with a prompt and a prediction of so many bytes."""
    return BODY_FACTOR * 2 * text_bytes + BESIDES_BYTES


def _most_bytes(parts: HttpDependencies, path: str, tenant: Tenant) -> int:
    """Returns the most bytes of a body that the caller's own limits allow: longer texts than any model, and the
    caller's key, take are of no use, unless they are only to be counted."""
    most, longest = parts.config.max_prompt_bytes, parts.tokenizer.longest_token
    if longest and (length := parts.router.longest) and path not in COUNTING:
        most = min(most, longest * tenant.most_prompt(length))
    return _body_bytes(most)


async def _invalid(request: Request, error: Exception) -> Response:
    """The first fault of a body, without its value."""
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    if faults[0]["type"] == "json_invalid":
        at, fault = faults[0]["loc"][-1], faults[0]["ctx"]["error"]
        return _response(
            request, InvalidArgument(f"The body is no JSON, from its character {at} on: {fault}.", reason="NOT_JSON")
        )
    # Of a field that may be of several kinds: the fault of the kind that the value was nearest to.
    field = faults[0]["loc"][:2]
    first = max((each for each in faults if each["loc"][:2] == field), key=lambda each: len(each["loc"]))
    fields = [str(part) for part in first["loc"][1:] if not _KIND.fullmatch(str(part))]
    if not fields:
        return _response(
            request, InvalidArgument("Send a JSON object, with content-type: application/json.", reason="NOT_JSON")
        )
    return _response(request, _wrong(".".join(fields), first), fields[0])


def _wrong(name: str, fault: Any) -> InvalidArgument:
    """The fault that pydantic found in a field, without its value."""
    if fault["type"] == "extra_forbidden":
        known = ", ".join(sorted(SpeculationField.model_fields))
        message = f"{name[:_MOST_NAMED]}: no such field; speculation has {known}."
        return InvalidArgument(message, reason=FIELD_INVALID, field=name[:_MOST_NAMED])
    reason = _REASONS.get(fault["type"], FIELD_INVALID)
    return InvalidArgument(f"{name}: {fault['msg']}.", reason=reason, field=name)


async def _refused(request: Request, error: Exception) -> Response:
    """Answers requests that the framework refuses: unknown paths and methods, and bodies that are not JSON."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:256]
    if error.status_code == 404:
        return _response(request, NotFound(f"There is no {path}; /docs lists what there is.", reason="NO_ROUTE"))
    if error.status_code == 405:
        answer = _response(
            request, MethodNotAllowed(f"{request.method} is not for {path}; /docs lists what is.", reason="METHOD")
        )
        answer.headers.update(error.headers or {})
        return answer
    return _response(request, InvalidArgument("The body cannot be read; send JSON.", reason="NOT_JSON"))


async def _failed(request: Request, error: Exception) -> Response:
    return _response(request, error)


def _response(request: Request, error: Exception, param: str | None = None) -> Response:
    answer = http_error(error, request.scope, param)
    return JSONResponse(answer.body, answer.status, answer.headers)
