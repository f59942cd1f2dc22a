"""The entry of every HTTP request, before it is parsed: request id, host, API key, the body's size and time, errors.

A plain ASGI application around the routes, so that nothing of a refused request is parsed.

Of a gateway that asks for no key and listens to its own machine alone, the names are checked under which web pages
reach it. A page of anybody's can name its own host 127.0.0.1 (DNS rebinding): to the browser the gateway is then the
page's own server, and CORS protects nothing. The header Host still has the page's name, which no page can change.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from gateway.api.http.body import BodyReader, Left, give_back
from gateway.api.http.errors import http_error, is_anthropic
from gateway.auth.api_keys import ApiKeys
from gateway.request_context import RequestContext
from slipstream.errors import PermissionDenied

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, SendMessage], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready"})
"""Paths that need no key: probes have none."""
REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"
"""Header in which Anthropic's clients look for it."""
OPEN_PAGE = re.compile(r"/playground(/[a-z]+\.(css|js|svg))?")
"""Files without content of anybody: a browser asks for them without a key, which the page's own requests send."""
_MODELS = "/v1/models"
"""A path that clients of OpenAI's and of Anthropic's share."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CONTEXT = "slipstream.request_context"


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or OPEN_PAGE.fullmatch(path) is not None


@dataclass(frozen=True, slots=True)
class LocalHosts:
    allowed: frozenset[str]
    """Names besides those of this machine."""

    def check(self, header: str) -> None:
        """Raises PermissionDenied for a Host that a web page from elsewhere may have as its own."""
        name = _name(header)
        # A name without dots is one of this network: no page of the web has it.
        if "." not in name or name.endswith(".localhost") or name in self.allowed or _is_address(name):
            return
        raise PermissionDenied(
            "This gateway has no keys, so it answers to this machine's own names alone; list the name of a container "
            "or proxy in GATEWAY_HTTP_HOSTS, a page's origin in GATEWAY_HTTP_ORIGINS, or set GATEWAY_API_KEYS.",
            reason="HOST",
        )


def local_hosts(listen: str, origins: Sequence[str], hosts: Sequence[str] = ()) -> LocalHosts | None:
    """`hosts`: further names. None for a gateway that listens to other machines too, or that any page may use."""
    name = _name(listen)
    local = name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)
    if not local or "*" in origins or "*" in hosts:
        return None
    pages = (urlsplit(origin).hostname for origin in origins)
    return LocalHosts(frozenset([*filter(None, pages), *map(_name, hosts)]))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """HOST of HOST or HOST:PORT, in lower case; an address in brackets without them."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


class Entry:
    def __init__(self, routes: Application, keys: ApiKeys | None, bodies: BodyReader, hosts: LocalHosts | None) -> None:
        """`keys`: None for a gateway without keys. `hosts`: None for one that is reached by any name."""
        self._routes = routes
        self._keys = keys
        self._bodies = bodies
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        if scope["type"] != "http":
            return
        context = scope.setdefault("state", {})[_CONTEXT] = _request_context(scope)
        answer = _Answering(send, scope, _request_id(context))
        try:
            if self._hosts is not None:
                for host in (value for name, value in context.headers if name == "host"):
                    self._hosts.check(host)
            if self._keys is not None and not _is_open(scope["path"]):
                context = replace(context, tenant=await self._keys.authenticate(context))
                scope["state"][_CONTEXT] = context
            read = self._bodies.read(scope, context.tenant, context.header("content-length"), receive)
            body = _replay(await read, receive)
            await self._routes(scope, body, answer.send)
        except Left:
            return
        except Exception as error:
            if answer.started:  # what failed was logged there, and nothing more can be said
                return
            await _send_error(error, scope, answer.send)
        finally:
            give_back(scope)


def context_of(scope: Scope) -> RequestContext:
    """The context of the request that this ASGI scope belongs to."""
    context: RequestContext = scope["state"][_CONTEXT]
    route = scope.get("route")
    return context if route is None else replace(context, http_method=scope["method"], http_route=route.path)


class _Answering:
    """Sends the answer with the headers that every answer has."""

    def __init__(self, send: SendMessage, scope: Scope, request_id: str) -> None:
        self._send = send
        names = [REQUEST_ID, ANTHROPIC_REQUEST_ID] if is_anthropic(scope) else [REQUEST_ID]
        self._headers = [
            *((name.encode(), request_id.encode()) for name in names),
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
    if answer.status in (401, 403, 408, 413, 503):  # the rest of the request is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _request_context(scope: Scope) -> RequestContext:
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    names = [name for name, _ in headers]
    listing = scope["path"].startswith(_MODELS) and "anthropic-version" in names
    if (listing or is_anthropic(scope)) and "authorization" not in names:
        # Anthropic's clients send their key in a header of its own.
        headers = [
            ("authorization", f"Bearer {value}") if name == "x-api-key" else (name, value) for name, value in headers
        ]
    return RequestContext(headers, peer_of(scope.get("client")))


def peer_of(client: tuple[str, int] | None) -> str:
    """The peer as gRPC names it."""
    host, port = client or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _request_id(context: RequestContext) -> str:
    given = context.header(REQUEST_ID)
    return given if _ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body again, and then what the connection gives."""
    parts = [body]

    async def replayed() -> Message:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

    return replayed
