"""A gateway as a process: when it serves, how it ends, and what it says of its settings."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, GatewayServer, running
from gateway.store.memory import MemoryBackend
from gateway.store.redis import RedisStore, connect
from gateway.store.session_store import SessionStore
from slipstream.errors import FailedPrecondition, OutOfRange, SlipstreamError, Unavailable
from slipstream.rpc.channel import channel, error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.gateway_calls import store
from tests.support.gateway_process import announced, gateway_process
from tests.support.loopback_addresses import HOST, free_port
from tests.support.scripted_gateway import Answer, Setting
from tests.support.scripted_verifier import served


@asynccontextmanager
async def lonely(
    folder: Path, store: SessionStore | None = None, verifier: str = "127.0.0.1:1", wait_s: float = 0.1, **world: Any
) -> AsyncIterator[tuple[GatewayServer, Any]]:
    """A gateway whose verifier cannot be reached, and its stub. Requests wait `wait_s` seconds for one."""
    names = {"verifiers": (verifier,), "tokenizer": str(folder), "listen": "127.0.0.1:0"}
    config = GatewayConfig(**names, grace_s=0.0, rehoming_wait_s=wait_s)
    outside = GatewayDependencies(random.Random(5).getrandbits, store=store, **world)
    async with running(config, outside) as gateway, channel(gateway.address) as line:
        yield gateway, gateway_pb2_grpc.GatewayServiceStub(line)


async def test_without_any_verifier_requests_are_unavailable(folder: Path) -> None:
    async with lonely(folder) as (_, stub):
        for call in (
            stub.ListModels(gateway_pb2.ListModelsRequest()),
            stub.Tokenize(gateway_pb2.TokenizeRequest(text="a")),
            stub.Generate(gateway_pb2.GenerateRequest(prompt="a")).read(),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await call
            error: SlipstreamError = error_of(caught.value)
            assert isinstance(error, Unavailable) and error.reason == "NO_VERIFIER"


async def until_waiting(gateway: GatewayServer, asked: asyncio.Task[Any]) -> None:
    """Return once the request waits for its verifier (nothing else waits for changes here), or was answered."""
    while not gateway.router.changes._event._waiters and not asked.done():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("call", ["generate", "resume", "roll back"])
async def test_a_request_that_comes_before_the_first_verifier_waits_for_it(
    setting: Setting, folder: Path, call: str
) -> None:
    """As where a gateway is replaced by a new process: it listens before any verifier has answered it."""
    front = await setting.front(setting.verifier(limit=9))
    reading = front.call(max_tokens=40)
    session = (await reading.read()).started.session_id
    await reading.read()
    reading.cancel()
    while front.gateway.sessions.open_sessions:
        await asyncio.sleep(0.001)
    front.verifiers[0].limit = None
    found = asyncio.Event()

    async def resolve(_: str) -> list[str]:
        await found.wait()
        return front.addresses

    async with lonely(folder, front.store, "dns:///verifiers:1", 60.0, resolve=resolve) as (gateway, stub):
        alone = replace(front, gateway=gateway, stub=stub)
        asked: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "generate": lambda: alone.generate(max_tokens=40),
            "resume": lambda: alone.resume(session),
            "roll back": lambda: alone.roll_back(session, 1),
        }
        answer = asyncio.create_task(asked[call]())
        await until_waiting(gateway, answer)
        found.set()
        answered = await answer
        if call == "roll back":
            assert answered.output_tokens == 1
        else:
            assert answered.tokens == front.verifiers[0].script[:40]


async def test_a_gateway_that_ends_keeps_no_request_that_waits_for_a_first_verifier(folder: Path) -> None:
    async with lonely(folder, wait_s=3600.0) as (gateway, stub):
        asked = asyncio.create_task(stub.Generate(gateway_pb2.GenerateRequest(prompt="a")).read())
        await until_waiting(gateway, asked)
        await gateway.sessions.close()
        with pytest.raises(grpc.RpcError) as caught:
            await asked
        assert error_of(caught.value).reason == "SUSPENDED"


async def test_a_text_that_ended_is_resumed_without_any_verifier(setting: Setting, folder: Path) -> None:
    front = await setting.front(setting.verifier(per_round=17))
    whole = await front.generate(stop=["lief 🚀"], max_tokens=60)
    session = whole.started.session_id
    async with lonely(folder, front.store) as (_, stub):
        alone = replace(front, stub=stub)
        again = await alone.resume(session)
        assert (again.started, again.text, again.finished) == (whole.started, whole.text, whole.finished)
        with pytest.raises(OutOfRange):
            await alone.resume(session, revision=1)


async def test_a_gateway_that_lost_all_verifiers_goes_on_answering(setting: Setting) -> None:
    front = await setting.front(setting.verifier(), rehoming_wait_s=0.2)
    whole = await front.generate()
    await front.servers[0].stop(0)
    while any(verifier.ready for verifier in front.gateway.router.verifiers):
        await front.gateway.router.changes.wait()
    async with channel(front.gateway.address) as line:
        health = health_pb2_grpc.HealthStub(line)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(Unavailable) as caught:
        await front.generate()
    assert caught.value.reason == "NO_VERIFIER"
    assert (await front.resume(whole.started.session_id)).text == whole.text
    assert (await front.stub.ListModels(gateway_pb2.ListModelsRequest())).models


async def test_a_text_in_another_vocabulary_is_neither_resumed_nor_rolled_back(setting: Setting) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(), store=store(memory, "a"))
    session = (await front.generate()).started.session_id
    entry = memory.entries[session]
    asked = gateway_pb2.StoredRequest.FromString(entry.params)
    assert asked.vocabulary_fingerprint == setting.model.vocabulary_fingerprint
    asked.vocabulary_fingerprint = "f00d"
    entry.params = asked.SerializeToString()
    for call in (front.resume(session), front.roll_back(session, 3)):
        with pytest.raises(FailedPrecondition, match="f00d") as caught:
            await call
        assert caught.value.reason == "VOCABULARY_MISMATCH"


async def test_a_process_announces_that_it_is_ready_and_finishes_its_sessions_on_sigterm(
    setting: Setting, folder: Path, redis_url: str
) -> None:
    verifier = setting.verifier(limit=9)
    async with served(verifier) as (address, _), gateway_process(folder, address, store=redis_url) as process:
        target = await announced(process)
        async with channel(target) as line:
            stub = gateway_pb2_grpc.GatewayServiceStub(line)
            health = health_pb2_grpc.HealthStub(line)
            told = await health.Check(health_pb2.HealthCheckRequest())
            assert told.status == health_pb2.HealthCheckResponse.SERVING
            answer = Answer()
            async for event in stub.Generate(gateway_pb2.GenerateRequest(prompt="x", max_tokens=40)):
                answer.add(event)
                if len(answer.tokens) == 9 and event.HasField("delta"):
                    process.terminate()
                    verifier.limit = None
        assert answer.tokens == verifier.script[:40]
        assert await process.wait() == 0
    store = RedisStore(connect(redis_url), owner="reader", ttl_s=60, lease_s=60)
    assert list((await store.read(answer.started.session_id)).tokens[1:]) == answer.tokens
    await store.close()


async def test_a_process_that_waits_for_its_verifier_is_not_serving_and_ends_on_sigterm(folder: Path) -> None:
    listen = f"{HOST}:{free_port()}"
    async with gateway_process(folder, "127.0.0.1:1", listen=listen) as process:
        async with channel(listen) as line:
            check = health_pb2.HealthCheckRequest()
            told = await health_pb2_grpc.HealthStub(line).Check(check, wait_for_ready=True, timeout=120)
        assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING
        process.terminate()
        assert await process.wait() == 0


async def test_a_process_with_an_invalid_setting_exits_with_status_1(folder: Path) -> None:
    async with gateway_process(folder, "127.0.0.1:1", durability="sometimes") as process:
        assert await process.wait() == 1


async def test_a_worker_that_is_written_into_a_file_joins_without_a_restart(
    setting: Setting, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "verifiers"
    async with served(setting.verifier()) as (first, _), served(setting.verifier()) as (second, _):
        file.write_text(f"{first}\n")
        async with (
            gateway_process(folder, f"file://{file}", discovery_s="0.1") as process,
            channel(await announced(process)) as line,
        ):
            stub = gateway_pb2_grpc.GatewayServiceStub(line)

            async def verifiers() -> int:
                listed = await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=10)
                return int(listed.models[0].verifiers)

            assert await verifiers() == 1
            file.write_text(f"{first}\n{second}\n")
            async with asyncio.timeout(30):
                while await verifiers() != 2:
                    await asyncio.sleep(0.05)
