"""What an image's HEALTHCHECK hears."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from slipstream.health import healthy
from slipstream.rpc.server import Server


@pytest.mark.parametrize("ready", [True, False])
async def test_a_role_is_healthy_while_it_says_so(ready: bool) -> None:
    server = Server([])
    try:
        await server.start("127.0.0.1:0", "127.0.0.1:0")
        await server.set_serving(ready)
        assert await asyncio.to_thread(healthy, server.health_address) is ready
    finally:
        await server.stop(0)


async def test_a_service_that_nobody_offers_is_not_healthy() -> None:
    server = Server([])
    try:
        await server.start("127.0.0.1:0", "127.0.0.1:0")
        await server.set_serving(True)
        assert not await asyncio.to_thread(healthy, server.health_address, "elsewhere")
    finally:
        await server.stop(0)


def test_nobody_there_is_exit_status_1() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        command = [sys.executable, "-m", "slipstream.health", address]
        assert subprocess.run(command, check=False, timeout=60).returncode == 1
