"""What an image's HEALTHCHECK, and `tests.health` as any client, say of a role."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import pytest

from slipstream.rpc.server import Server
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.v1 import worker_pb2
from tests.health import healthy

HEALTHCHECK = Path(__file__).resolve().parents[4] / "docker" / "healthcheck"


def asked_by_bash(address: str) -> bool:
    done = subprocess.run(["bash", HEALTHCHECK, address], stderr=subprocess.DEVNULL, check=False, timeout=60)
    return done.returncode == 0


@pytest.mark.parametrize("ready", [True, False])
async def test_a_role_is_healthy_while_it_says_so(ready: bool) -> None:
    server = Server([])
    try:
        await server.start("127.0.0.1:0", "127.0.0.1:0")
        await server.set_serving(ready)
        for ask in (healthy, asked_by_bash):
            assert await asyncio.to_thread(ask, server.health_address) is ready
    finally:
        await server.stop(0)


@pytest.mark.parametrize("ready", [True, False])
async def test_each_service_is_healthy_by_its_own_name_too(ready: bool) -> None:
    """Clients with `healthCheckConfig` ask for the service that they call."""
    worker = WorkerService(WorkerIdentity("model", worker_pb2.ROLE_DRAFTER), worker_pb2.WatchResponse)
    server = Server([worker.register])
    try:
        await server.start("127.0.0.1:0", "127.0.0.1:0")
        await server.set_serving(ready)
        for address in (server.address, server.health_address):
            assert await asyncio.to_thread(healthy, address, "slipstream.v1.WorkerService") is ready
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


def test_nobody_there_is_not_healthy() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        assert not asked_by_bash(f"127.0.0.1:{reserved.getsockname()[1]}")


def test_whoever_accepts_and_says_nothing_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        assert not asked_by_bash(f"127.0.0.1:{frozen.getsockname()[1]}")
