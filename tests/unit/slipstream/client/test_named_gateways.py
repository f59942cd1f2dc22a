"""A name behind which no gateway listens for a moment: a rollout replaced those that it had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import RetrySettings
from slipstream.errors import Unavailable
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.loopback_addresses import free_port
from tests.unit.slipstream.client.test_completion import STARTED, delta, finished


class OneText(gateway_pb2_grpc.GatewayServiceServicer):
    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        for event in (STARTED, delta(0, 5, text="a"), finished(1)):
            yield event


async def test_a_request_begins_on_a_gateway_that_comes_behind_its_name() -> None:
    port = free_port()
    async with AsyncClient(f"dns:///127.0.0.1:{port}") as client:
        asked = asyncio.create_task(client.generate("Tell me."))
        await asyncio.sleep(0.2)
        assert not asked.done()
        server = grpc.aio.server()
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(OneText(), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        assert (await asked).text == "a"
        await server.stop(None)


async def test_an_address_without_a_listener_fails_at_once() -> None:
    """A wait would hide that it is wrong."""
    began = asyncio.get_running_loop().time()
    async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unavailable, match="no gateway answered"):
            await client.generate("Tell me.")
    assert asyncio.get_running_loop().time() < began + 2.5


async def test_without_begin_s_a_request_that_no_gateway_answered_is_not_sent_again() -> None:
    async with AsyncClient(f"dns:///127.0.0.1:{free_port()}", retry=RetrySettings()) as client:
        with pytest.raises(Unavailable, match="no gateway answered"):
            await client.generate("Tell me.")
