"""A gateway's log names a worker that stays away, once, and says when it is back."""

from __future__ import annotations

import asyncio

import pytest

from gateway.routing import worker_watch
from gateway.routing.worker_watch import WorkerWatch
from slipstream.rpc.channel import channel
from slipstream.v1 import types_pb2
from tests.support.fleet import until
from tests.support.loopback_addresses import HOST, free_port
from tests.support.scripted_verifier import ScriptedVerifier, served

MODEL = types_pb2.ModelInfo(name="m")


async def test_a_worker_that_stays_away_is_logged_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="gateway.routing.worker_watch")
    monkeypatch.setattr(worker_watch, "AWAY_S", 0.2)
    address, tries = f"{HOST}:{free_port()}", 0

    def tried() -> None:
        nonlocal tries
        tries += 1

    async with channel(address) as line:
        watch = WorkerWatch(address, line, tried)
        watching = asyncio.create_task(watch.run())
        await until(lambda: bool(caplog.messages))
        before = tries
        await until(lambda: tries > before + 1)
        (away,) = caplog.messages
        assert away.startswith(f"{address} has not answered for ")
        async with served(ScriptedVerifier(MODEL, []), address):
            await until(lambda: len(caplog.messages) > 1)
            assert caplog.messages[1:] == [f"{address} answers again"] and watch.present
        watching.cancel()
        await asyncio.wait([watching])
