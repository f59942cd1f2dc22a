"""What a newer peer says that this build does not know, and what this build asks for that an older one lacks."""

from __future__ import annotations

import grpc
import pytest

from slipstream.errors import FailedPrecondition, Unavailable
from slipstream.rpc.channel import WRONG_SERVICE, error_of
from slipstream.v1 import gateway_pb2
from tests.integration.test_store_faults import system
from tests.support.fleet import emulated_text

UNKNOWN = b"\xc2\xfa\x01\x04new!"
"""Field 4008, which no message has, with 4 bytes."""


async def test_fields_of_a_newer_build_are_ignored() -> None:
    plain = gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(token_ids=[3, 8, 9]),
        max_tokens=20,
        sampling=gateway_pb2.SamplingOptions(temperature=0.0),
    )
    asked = gateway_pb2.GenerateRequest.FromString(plain.SerializeToString() + UNKNOWN)
    assert asked.SerializeToString().endswith(UNKNOWN)  # it is sent
    async with system(None) as stub:
        tokens = [token async for event in stub.Generate(asked) for token in event.delta.token_ids]
    assert tokens == emulated_text([3, 8, 9], 20)


async def test_a_call_that_an_older_build_lacks_is_a_typed_error() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as line:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await line.unary_unary("/slipstream.v1.GatewayService/GetFleet")(b"", timeout=10)
    finally:
        await server.stop(0)
    found = error_of(caught.value)
    assert isinstance(found, FailedPrecondition) and found.reason == WRONG_SERVICE


def test_a_call_that_the_peer_gave_up_may_be_made_again_elsewhere() -> None:
    """Our own cancellation is no RpcError: it is Python's CancelledError."""
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, "CANCELLED")
    assert isinstance(error_of(error), Unavailable)
