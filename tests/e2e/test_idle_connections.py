"""A gateway's own process, whose HTTP listener somebody without a key fills with connections that say nothing."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import httpx
import pytest

from gateway.api.http.connections import SPARE
from gateway.api.http_front import CONNECTIONS_A_SESSION, SPARE_CONNECTIONS
from slipstream.serving.role import Role
from tests.e2e.conftest import ROOT
from tests.support.loopback_addresses import HOST, free_port

MOST = CONNECTIONS_A_SESSION + SPARE_CONNECTIONS
"""Connections of a gateway that runs one session."""
FLOOD, QUIET = "127.0.0.2", "127.0.0.3"
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(stack: AsyncExitStack, port: int, origin: str) -> Line:
    line = await asyncio.open_connection(HOST, port, local_addr=(origin, 0))
    stack.callback(line[1].close)
    return line


async def probe(line: Line) -> bytes:
    reader, writer = line
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    return await reader.readline()


@pytest.mark.timeout(120)
async def test_idle_connections_without_a_key_keep_no_client_out() -> None:
    """As a liveness probe asks, and a client: from the address of the flood and from another one."""
    port = free_port()
    settings = {"LISTEN": f"{HOST}:0", "HTTP": f"{HOST}:{port}", "TOKENIZER": str(ROOT / "models" / "target")}
    settings |= {"VERIFIERS": f"{HOST}:{free_port()}", "MAX_SESSIONS": "1", "HTTP_IDLE_S": "600"}
    role = Role("gateway", os.environ | {f"GATEWAY_{name}": each for name, each in settings.items()})
    starting = asyncio.create_task(role.start())  # it never can serve: it has no verifier
    async with AsyncExitStack() as stack:
        stack.push_async_callback(role.end)
        stack.callback(starting.cancel)
        async with asyncio.timeout(60):
            while True:
                try:
                    quiet = await connect(stack, port, QUIET)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        flood = [await connect(stack, port, FLOOD) for _ in range(MOST + 4 * SPARE)]
        await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60, trust_env=False) as client:
            for path, status in (("/health", 200), ("/ready", 503), ("/version", 200)):
                answer = await client.get(path)
                assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), path
        assert await probe(flood[-1]) == b"HTTP/1.1 200 OK\r\n"
        assert await probe(quiet) == b"HTTP/1.1 200 OK\r\n", "whoever has few connections keeps them"
        dropped = [line for line in flood if line[0].at_eof() or line[0].exception() is not None]
        assert len(dropped) >= 4 * SPARE
