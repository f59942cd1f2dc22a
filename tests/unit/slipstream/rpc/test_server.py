"""What callers see of a server: typed errors as statuses, health, shutdown."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from slipstream.errors import InvalidArgument, PermissionDenied, ResourceExhausted, SlipstreamError, Unavailable
from slipstream.rpc.channel import channel, error_of
from slipstream.rpc.server import LIVENESS, AccessControl, Server
from slipstream.rpc.status_interceptor import ERROR_DOMAIN
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.v1 import drafter_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc


class Failing(worker_pb2_grpc.WorkerServiceServicer, drafter_pb2_grpc.DrafterServiceServicer):
    """Raises the same from each kind of handler, the streams after their first message."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)

    async def GetModel(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.WatchResponse(sessions=1)
        raise self.error

    async def Draft(self, requests: Any, context: Any) -> None:
        await context.send_initial_metadata(())
        raise self.error


@asynccontextmanager
async def serving(*services: Any) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    server = Server([service.register for service in services])
    try:
        async with channel(await server.start("127.0.0.1:0")) as line:
            yield server, line
    finally:
        await server.stop(0)


async def failures(line: grpc.aio.Channel) -> list[grpc.RpcError]:
    worker, caught = worker_pb2_grpc.WorkerServiceStub(line), []
    watch, draft = worker.Watch(worker_pb2.WatchRequest()), drafter_pb2_grpc.DrafterServiceStub(line).Draft()
    assert (await watch.read()).sessions == 1
    for call in (worker.GetModel(worker_pb2.GetModelRequest()), watch.read(), draft.read()):
        with pytest.raises(grpc.RpcError) as error:
            await call
        caught.append(error.value)
    return caught


@pytest.mark.parametrize("kind", SlipstreamError.__subclasses__())
async def test_typed_errors_become_their_status_with_a_reason(kind: type[SlipstreamError]) -> None:
    async with serving(Failing(kind("Do this.", reason="WORD"))) as (_, line):
        for error in await failures(line):
            assert (error.code(), error.details()) == (kind.code, "Do this.")
            back = error_of(error)
            assert (type(back), back.reason) == (kind, "WORD")
            details = list(rpc_status.from_call(error).details)
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            assert details[0].Unpack(info) and info.domain == ERROR_DOMAIN
            wait = [detail for detail in details if detail.Unpack(retry)]
            assert bool(wait) is (kind in (ResourceExhausted, Unavailable))


async def test_an_unexpected_exception_is_internal_and_keeps_its_text_to_itself() -> None:
    async with serving(Failing(ValueError("password"))) as (_, line):
        for error in await failures(line):
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "password" not in repr(error)


async def test_a_failed_call_of_the_handler_itself_keeps_its_text_to_itself() -> None:
    inner = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away", "password"
    )
    async with serving(Failing(inner)) as (_, line):
        for error in await failures(line):
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "password" not in repr(error)


async def test_liveness_is_serving_from_the_start_of_a_process_to_its_end() -> None:
    server = Server([])
    await server.start("127.0.0.1:0", "127.0.0.1:0")
    async with channel(server.health_address) as line:
        health, waiting = health_pb2_grpc.HealthStub(line), channel(server.address)

        async def states() -> list[bool]:
            answers = [await health.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", LIVENESS)]
            return [answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers]

        assert await states() == [False, True]
        await server.set_serving(True)
        assert await states() == [True, True]
        watch = health_pb2_grpc.HealthStub(waiting).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        stopping = asyncio.create_task(server.stop(30))  # a stream keeps it waiting
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)  # too late
        assert await states() == [False, True]
        watch.cancel()
        await stopping
        await waiting.close()


async def test_health_is_not_serving_until_it_is_set_and_again_from_stop_on() -> None:
    async with serving() as (server, line):
        health, request = health_pb2_grpc.HealthStub(line), health_pb2.HealthCheckRequest()
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(5))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        await stopping


async def test_an_address_in_use_is_refused_with_its_name() -> None:
    first, second = Server([]), Server([])
    address = await first.start("127.0.0.1:0")
    with pytest.raises(Unavailable, match=address):
        await second.start(address)
    await first.stop(0)
    await second.stop(0)


async def test_a_worker_reports_its_model_and_sends_its_load_only_when_it_changes() -> None:
    load = worker_pb2.WatchResponse(sessions=1)
    model = types_pb2.ModelInfo(name="toy")
    worker = WorkerService(WorkerIdentity(model, worker_pb2.ROLE_DRAFTER, "ngram"), lambda: load)
    async with serving(worker) as (server, line):
        stub = worker_pb2_grpc.WorkerServiceStub(line)
        told = await stub.GetModel(worker_pb2.GetModelRequest())
        assert (told.model.name, told.role, told.method) == ("toy", worker_pb2.ROLE_DRAFTER, "ngram")
        watch = stub.Watch(worker_pb2.WatchRequest())
        assert (await watch.read()).sessions == 1
        load = worker_pb2.WatchResponse(sessions=2)
        assert (await watch.read()).sessions == 2
        await server.stop(0)
        with pytest.raises(grpc.RpcError) as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_sentence_that_quotes_its_caller_is_cut_to_what_metadata_carries() -> None:
    async with serving(Failing(InvalidArgument("\N{BLACK STAR}" * 100_000))) as (_, line):
        for error in await failures(line):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert 1000 < len((error.details() or "").encode()) <= 1024


async def test_a_call_that_is_not_authorised_is_not_even_parsed() -> None:
    def nobody(method: str, context: Any) -> None:
        raise PermissionDenied(f"not {method}")

    server = Server([Failing(ValueError()).register], AccessControl(authorise=nobody))
    async with channel(await server.start("127.0.0.1:0")) as line:
        for path in ("/slipstream.v1.WorkerService/GetModel", "/grpc.health.v1.Health/Check"):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await line.unary_unary(path)(b"\xff\xff no protobuf")
            assert refusal.value.details() == f"not {path}"
    await server.stop(0)
    open_server = Server([Failing(ValueError()).register])
    async with channel(await open_server.start("127.0.0.1:0")) as line:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await line.unary_unary("/slipstream.v1.WorkerService/GetModel")(b"\xff\xff no protobuf")
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await open_server.stop(0)


class Held:
    """What a handler has read of a request."""


async def test_resources_of_a_refused_call_are_freed_without_the_garbage_collector() -> None:
    """gRPC keeps the exception of an aborted call in a circle."""
    held: list[weakref.ref[Held]] = []

    class Refusing(worker_pb2_grpc.WorkerServiceServicer):
        def register(self, server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

        async def GetModel(self, request: Any, context: Any) -> Any:
            large = Held()
            held.append(weakref.ref(large))
            try:
                raise ValueError("why")
            except ValueError as error:
                raise InvalidArgument("no") from error

        async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
            large = Held()
            held.append(weakref.ref(large))
            yield worker_pb2.WatchResponse(sessions=1)
            raise Unavailable("no")

    async with serving(Refusing()) as (_, line):
        stub = worker_pb2_grpc.WorkerServiceStub(line)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(grpc.RpcError):
                    await stub.GetModel(worker_pb2.GetModelRequest())
                with pytest.raises(grpc.RpcError):
                    async for _ in stub.Watch(worker_pb2.WatchRequest()):
                        pass
            assert len(held) == 6
            assert not [each for each in held[:-1] if each() is not None]
        finally:
            gc.enable()


async def test_large_metadata_reaches_no_handler() -> None:
    async with serving(Failing(ValueError())) as (_, line):
        call = health_pb2_grpc.HealthStub(line).Check(
            health_pb2.HealthCheckRequest(), metadata=(("x-junk", "x" * 100_000),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await health_pb2_grpc.HealthStub(line).Check(health_pb2.HealthCheckRequest())
