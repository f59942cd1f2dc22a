"""`/metrics` of a role for Prometheus, on a plaintext port of its own; OpenMetrics if the request accepts it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from socket import AF_INET6, SHUT_RDWR, socket
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, ThreadingWSGIServer, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from slipstream.errors import InvalidArgument, Unavailable
from slipstream.telemetry.metrics_collector import MetricsCollector

READ_S = 5.0
"""Most seconds to wait for the event loop's numbers; a scrape of a stuck process should fail."""
SILENCE_S = 5.0
"""Seconds without a byte after which a connection is closed."""
SCRAPE_S = 10.0
"""Most seconds from the first byte of a request to the last of its response."""
MOST_SCRAPES = 8
"""Most scrapes at once; more are refused."""
LOOK_S = 0.1
"""Seconds between the listener's checks for its shutdown."""


@asynccontextmanager
async def exposing(meter: MetricsCollector, listen: str) -> AsyncIterator[str]:
    """Serves for as long as the block lasts and yields the bound address. Port 0 picks a free one; an empty `listen`
    serves nothing.

    Raises InvalidArgument for an address that is not HOST:PORT, Unavailable where it cannot listen.
    """
    if not listen:
        yield ""
        return
    server = _listen(listen, _application(meter, asyncio.get_running_loop()))
    threading.Thread(target=server.serve_forever, args=[LOOK_S], name="metrics", daemon=True).start()
    try:
        yield f"{listen.rpartition(':')[0]}:{server.server_port}"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def _application(meter: MetricsCollector, loop: asyncio.AbstractEventLoop) -> Callable[..., Iterable[bytes]]:
    async def read() -> None:
        meter.read()

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            asyncio.run_coroutine_threadsafe(read(), loop).result(READ_S)
        except (TimeoutError, RuntimeError):  # stuck, or closed
            start("503 Service Unavailable", [])
            return ()
        kind, page = metrics_page(meter, environ.get("HTTP_ACCEPT", ""))
        start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(page)))])
        return (page,)

    return application


def metrics_page(meter: MetricsCollector, accept: str) -> tuple[str, bytes]:
    """Content type and content; only OpenMetrics has exemplars."""
    if "application/openmetrics-text" not in accept:
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(meter.registry)
    # The library's other escaping schemes turn `vllm:x` into `vllm_x`, although a colon is a valid character.
    page: bytes = openmetrics.generate_latest(meter.registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return "application/openmetrics-text; version=1.0.0; charset=utf-8", page


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingWSGIServer):
    def __init__(self, address: tuple[str, int]) -> None:
        self._room = threading.BoundedSemaphore(MOST_SCRAPES)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the base class's DNS lookup of the own name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The handler's own timeout is for each read: a peer that sends its request byte by byte would hold its slot.
        end = threading.Timer(SCRAPE_S, _cut, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Ignores a peer that closed the connection."""


def _cut(request: socket) -> None:
    with suppress(OSError):
        request.shutdown(SHUT_RDWR)


class _Server6(_Server):
    address_family = AF_INET6


def _listen(listen: str, application: Callable[..., Iterable[bytes]]) -> _Server:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f"metrics_listen={listen!r}; give HOST:PORT, or nothing for no metrics.")
    kind = _Server6 if ":" in host else _Server
    try:
        server = kind((host.strip("[]"), int(port)))
    except (OSError, OverflowError) as error:
        raise Unavailable(f"cannot listen on {listen} for metrics; choose another address or port 0.") from error
    server.set_app(application)
    return server
