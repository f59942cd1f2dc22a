"""The socket that the HTTP server listens on."""

from __future__ import annotations

import asyncio
import socket

from gateway.api.http.server import bind


async def test_responses_are_sent_without_nagles_delay() -> None:
    """Headers and body, and the chunks of a stream, are small writes: Nagle's algorithm would hold back each of them
    until the client has acknowledged the one before, which takes 40 ms."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1:0")
    async with await asyncio.start_server(serve, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        assert await asyncio.wait_for(accepted, 60)
        writer.close()
