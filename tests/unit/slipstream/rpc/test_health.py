"""What an image's HEALTHCHECK, and `tests.support.health_check` as any client, say of a role."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.rpc.channel import channel
from slipstream.rpc.health import Health
from slipstream.rpc.server import LIVENESS, Server
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.v1 import worker_pb2
from tests.support.health_check import healthy

HEALTHCHECK = Path(__file__).resolve().parents[4] / "docker" / "healthcheck"


def asked_by_bash(address: str) -> bool:
    done = subprocess.run(["bash", HEALTHCHECK, address], stderr=subprocess.DEVNULL, check=False, timeout=60)
    return done.returncode == 0


@pytest.mark.parametrize("ready", [True, False])
async def test_a_role_is_healthy_while_it_reports_serving(ready: bool) -> None:
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


async def test_a_service_that_is_not_offered_is_not_healthy() -> None:
    server = Server([])
    try:
        await server.start("127.0.0.1:0", "127.0.0.1:0")
        await server.set_serving(True)
        assert not await asyncio.to_thread(healthy, server.health_address, "elsewhere")
    finally:
        await server.stop(0)


def test_an_address_without_a_server_is_not_healthy() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        assert not asked_by_bash(f"127.0.0.1:{reserved.getsockname()[1]}")


def test_a_server_that_accepts_and_never_answers_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        assert not asked_by_bash(f"127.0.0.1:{frozen.getsockname()[1]}")


class Watcher:
    """The context of a call of `Watch` whose client reads once `reading` is set."""

    def __init__(self, reads: bool) -> None:
        self.reading, self.answers, self.code = asyncio.Event(), list[health_pb2.HealthCheckResponse](), None
        if reads:
            self.reading.set()

    async def write(self, answer: health_pb2.HealthCheckResponse) -> None:
        await self.reading.wait()
        self.answers.append(answer)

    async def abort(self, code: grpc.StatusCode) -> None:
        raise PermissionError(code)


async def test_a_watcher_that_reads_nothing_holds_up_no_change_and_no_other_watcher() -> None:
    health, asked = Health(), health_pb2.HealthCheckRequest()
    health.set("", False)
    deaf, reader = Watcher(False), Watcher(True)
    watching = [asyncio.create_task(health.Watch(asked, each)) for each in (deaf, reader)]
    for serving in (True, False, True):
        await asyncio.sleep(0.001)
        health.set("", serving)
    await asyncio.sleep(0.001)
    statuses = [answer.status for answer in reader.answers]
    assert statuses == [2, 1, 2, 1] and not deaf.answers
    deaf.reading.set()
    await asyncio.sleep(0.001)
    assert [answer.status for answer in deaf.answers] == [2, 1], "the first it saw, and the last"
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    with pytest.MonkeyPatch.context() as patch:  # those that left are not counted
        patch.setattr("slipstream.rpc.health.MOST_WATCHERS", 1)
        first = asyncio.create_task(health.Watch(asked, Watcher(True)))
        await asyncio.sleep(0)
        with pytest.raises(PermissionError, match="RESOURCE_EXHAUSTED"):
            await health.Watch(asked, Watcher(True))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_the_health_service_lists_all_statuses() -> None:
    server = Server([])
    address = await server.start("127.0.0.1:0")
    async with channel(address) as line:
        listed = await health_pb2_grpc.HealthStub(line).List(health_pb2.HealthListRequest())
    await server.stop(0)
    assert {name: each.status for name, each in listed.statuses.items()} == {"": 2, LIVENESS: 1}
    assert not server.errors
