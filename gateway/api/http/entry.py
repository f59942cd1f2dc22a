"""The entry of every HTTP request, before it is parsed: request id, API key, the body's size and time, errors.

A plain ASGI application around the routes, so that the caller is named in the request's own task and nothing of a
refused request is parsed.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from gateway.api.http.errors import RequestTimeout, RequestTooLarge, http_error, is_anthropic
from gateway.auth.api_keys import ApiKeys
from gateway.request_context import RequestContext
from slipstream.errors import InvalidArgument

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, SendMessage], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: probes have none."""
REQUEST_ID = "x-request-id"
OPEN_PAGE = re.compile(r"/playground(/[a-z]+\.(css|js|svg))?")
"""Files without content of anybody: a browser asks for them without a key, which the page's own requests send."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_CONTEXT = "slipstream.request_context"


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or OPEN_PAGE.fullmatch(path) is not None


class Left(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(frozen=True, slots=True)
class EntryLimits:
    body_bytes: int
    """Most bytes of a request's body."""
    idle_s: float
    """Seconds that a client has to send its body."""


class Entry:
    def __init__(self, routes: Application, keys: ApiKeys | None, limits: EntryLimits) -> None:
        """`keys`: None for a gateway without keys."""
        self._routes = routes
        self._keys = keys
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        if scope["type"] != "http":
            return
        context = _request_context(scope)
        scope.setdefault("state", {})[_CONTEXT] = context
        answer = _Answering(send, _request_id(context))
        try:
            if self._keys is not None and not _is_open(scope["path"]):
                await self._keys.authenticate(context)
            body = await self._read(context, receive)
            await self._routes(scope, _replay(body, receive), answer.send)
        except Left:
            return
        except Exception as error:
            if answer.started:  # what failed was logged there, and nothing more can be said
                return
            await _send_error(error, scope, answer.send)

    async def _read(self, context: RequestContext, receive: Receive) -> bytes:
        """The whole body. Raises RequestTooLarge before more than the limit is held, RequestTimeout, and Left."""
        most = self._limits.body_bytes
        declared = context.header("content-length")
        if declared.isdecimal() and int(declared[:20]) > most:
            raise _too_large(most)
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._limits.idle_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Left
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    parts.append(part)
        except TimeoutError as error:
            raise RequestTimeout(f"The body did not arrive within {self._limits.idle_s:g} s.") from error
        body = b"".join(parts)
        _check_unicode(body)
        return body


def _check_unicode(body: bytes) -> None:
    """Raises InvalidArgument for half a character, which JSON can write and UTF-8 cannot."""
    if _SURROGATE.search(body):
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("The request holds text that is not Unicode: a lone surrogate.") from error
        except (ValueError, RecursionError):  # no JSON: refused where it is parsed
            pass


def context_of(scope: Scope) -> RequestContext:
    """The context of the request that this ASGI scope belongs to."""
    context: RequestContext = scope["state"][_CONTEXT]
    return context


class _Answering:
    """Sends the answer with the headers that every answer has."""

    def __init__(self, send: SendMessage, request_id: str) -> None:
        self._send = send
        self._headers = [
            (REQUEST_ID.encode(), request_id.encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)


async def _send_error(error: Exception, scope: Scope, send: SendMessage) -> None:
    answer = http_error(error, scope)
    content = json.dumps(answer.body).encode()
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if answer.status in (401, 408, 413):  # the rest of the request is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _request_context(scope: Scope) -> RequestContext:
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    names = [name for name, _ in headers]
    if is_anthropic(scope) and "authorization" not in names:
        # Anthropic's clients send their key in a header of its own.
        headers = [
            ("authorization", f"Bearer {value}") if name == "x-api-key" else (name, value) for name, value in headers
        ]
    host, port = scope.get("client") or ("", 0)
    peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return RequestContext(headers, peer)


def _request_id(context: RequestContext) -> str:
    given = context.header(REQUEST_ID)
    return given if _ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body again, and then what the connection gives."""
    parts = [body]

    async def replayed() -> Message:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

    return replayed


def _too_large(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is above {most} bytes; send a shorter one.", reason="BODY_TOO_LARGE")
