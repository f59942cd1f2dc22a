"""A client that knows nothing of the contract calls a gateway: reflection gives it every message."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from slipstream.client.gateway_endpoint import digest, new_key
from tests.support.scripted_gateway import Setting

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


def symbols(address: str, service: str, *names: str) -> list[str]:
    """The file that each name is in, by a reflection service of this name."""
    with grpc.insecure_channel(address) as line:
        ask = line.stream_stream(
            f"/{service}/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
        answers = list(ask(iter(requests), timeout=60))
    files = [each.file_descriptor_response.file_descriptor_proto for each in answers]
    return [FileDescriptorProto.FromString(found[0]).name if found else "" for found in files]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_tools_of_either_version_find_services_methods_and_messages(setting: Setting, version: str) -> None:
    front = await setting.front(setting.verifier())
    names = (SERVICE, f"{SERVICE}.Generate", "slipstream.v1.GenerateRequest", f"{SERVICE}.Nothing")
    reflection = f"grpc.reflection.{version}.ServerReflection"
    found = await asyncio.to_thread(symbols, front.gateway.address, reflection, *names)
    assert found == ["slipstream/v1/gateway.proto"] * 3 + [""]


async def test_reflection_needs_a_key_as_every_service_does(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{digest(new_key()).hex()}" }}\n')
    front = await setting.front(setting.verifier(), api_keys=str(file))
    with pytest.raises(grpc.RpcError) as refused:
        await asyncio.to_thread(call, front.gateway.address, "ListModels", {})
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
