"""A client that knows nothing of the contract calls a gateway: reflection gives it every message."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from slipstream.client.gateway_endpoint import digest, new_key
from tests.front import Setting

SERVICE = "slipstream.v1.GatewayService"


def call(address: str, method: str, request: dict[str, object]) -> list[dict[str, object]]:
    """The answers of a method, as JSON, by descriptors that the server itself gave."""
    with grpc.insecure_channel(address) as line:
        database = ProtoReflectionDescriptorDatabase(line)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        found = DescriptorPool(database).FindServiceByName(SERVICE).methods_by_name[method]
        asked = json_format.ParseDict(request, message_factory.GetMessageClass(found.input_type)())
        answer = message_factory.GetMessageClass(found.output_type)
        stream = line.unary_stream(f"/{SERVICE}/{method}", type(asked).SerializeToString, answer.FromString)
        return [json_format.MessageToDict(each) for each in stream(asked, timeout=60)]


async def test_a_generic_client_generates(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    request: dict[str, object] = {"prompt": "Tell me.", "maxTokens": 12}
    events = await asyncio.to_thread(call, front.gateway.address, "Generate", request)
    assert [next(iter(event)) for event in events][:2] == ["started", "delta"]
    assert events[-1]["finished"] and (await asyncio.to_thread(call, front.gateway.address, "ListModels", {}))


async def test_reflection_needs_a_key_as_every_service_does(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{digest(new_key()).hex()}" }}\n')
    front = await setting.front(setting.verifier(), api_keys=str(file))
    with pytest.raises(grpc.RpcError) as refused:
        await asyncio.to_thread(call, front.gateway.address, "ListModels", {})
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
