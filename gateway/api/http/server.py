"""The HTTP server: uvicorn in the gateway's own event loop, with TLS, and bounds on headers and connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.api.http.connections import Connections
from gateway.api.http.entry import OPEN_PATHS, Application, peer_of
from gateway.api.http.reply import ABORT
from gateway.auth.api_keys import origin_of
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.rpc.tls import Certificates

MOST_HEADER_BYTES = 65_536
"""Most bytes of a request's first line and headers."""
BACKLOG = 2048
_STOP_S = 0.5
"""Seconds that connections have to close behind the grace of their sessions."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    connections: int
    """Most connections at a time: idle ones make room for further ones, and where none is idle requests are refused."""
    idle_s: float
    """Seconds that a client has to send a request's headers."""


class HttpServer:
    """`start` binds, `stop` drains."""

    def __init__(self, application: Application, certificates: Certificates | None, limits: ServerLimits) -> None:
        """`certificates`: None serves plaintext."""
        self._config = uvicorn.Config(
            application,
            http=partial(  # type: ignore[arg-type]
                _BoundedHeaders, idle_s=limits.idle_s, open_connections=Connections(limits.connections)
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            # A task of one request must not inherit who the caller of another one is.
            reset_contextvars=True,
            ssl_context_factory=None if certificates is None else (lambda *_: _tls(certificates)),
        )
        # Its warnings are about what strangers send; what fails here is logged where it fails.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _UvicornServer(self._config)
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self, listen: str) -> str:
        """Listen at HOST:PORT (port 0 picks a free one) and return the address. Raises Unavailable."""
        listener = bind(listen)
        self.address = f"{listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            self._serving.result()
        return self.address

    async def stop(self, grace_s: float) -> None:
        """Take no connections any more, and close those that are idle; requests have so many seconds to end."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=grace_s + _STOP_S)
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving


def bind(listen: str) -> socket.socket:
    """A socket that listens at HOST:PORT. Raises InvalidArgument for another form, Unavailable for a taken address."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidArgument(f"HTTP cannot listen at {listen!r}; give HOST:PORT, or `off`.")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY: otherwise each small write waits 40 ms for the client's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise Unavailable(
            f"cannot listen on {listen} for HTTP; choose another address, port 0 for a free one, or `off`."
        ) from error
    return listener


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own."""
        yield


class _BoundedHeaders(HttpToolsProtocol):
    """uvicorn's protocol for one of a bounded number of connections. Peers must send their headers within `idle_s` and
    within MOST_HEADER_BYTES."""

    def __init__(self, *, idle_s: float, open_connections: Connections, **named: Any) -> None:
        super().__init__(**named)
        self._idle_s = idle_s
        self._open = open_connections
        self._origin = ""
        self._room = True
        """Whether its requests are answered, and not refused."""
        self._due: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self.loop.call_later(self._idle_s, transport.abort)
        self._origin = origin_of(peer_of(self.client))
        self._room = self._open.add(self, self._origin)

    @property
    def idle(self) -> bool:
        return self._in_headers and (self.cycle is None or self.cycle.response_complete)

    def abort(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self._open.remove(self, self._origin)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._due = self._due or self.loop.call_later(self._idle_s, self.transport.abort)
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MOST_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._forget_deadline()
        self._in_headers, self._header_bytes = False, 0
        self._open.note_use(self, self._origin)
        probe = self.url.partition(b"?")[0].decode("latin-1") in OPEN_PATHS
        self.limit_concurrency = None if self._room or probe else 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers = True
        super().on_message_complete()

    def _forget_deadline(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def _tls(certificates: Certificates) -> ssl.SSLContext:
    """A context whose handshakes use the certificates as they are then."""
    used = certificates.current()
    present = certificates.server_context()
    context = certificates.server_context()

    def choose(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal used, present
        material = certificates.current()
        if material is not used:
            used, present = material, certificates.server_context()
        handshake.context = present

    context.sni_callback = choose
    return context
