"""`slipstream status`: what a gateway serves, and with which drafters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated

import grpc
import typer
from google.protobuf.json_format import MessageToJson

from slipstream.cli.options import ApiKey, Ca, Servers, Tls
from slipstream.cli.session import doors_of, talk
from slipstream.rpc.channel import parsed
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc


def status(
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the models that a gateway serves, how many verifiers have each, and its drafters."""

    async def ask(lines: Sequence[grpc.aio.Channel]) -> gateway_pb2.ListModelsResponse:
        request = gateway_pb2.ListModelsRequest()
        stub = gateway_pb2_grpc.GatewayServiceStub(lines[0])
        answer: gateway_pb2.ListModelsResponse = parsed(await stub.ListModels(request))
        return answer

    told = asyncio.run(talk("status", doors_of(server, api_key, tls, ca), ask))
    if as_json:
        typer.echo(MessageToJson(told, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        for line in _text(told):
            typer.echo(line)


def _text(told: gateway_pb2.ListModelsResponse) -> Iterator[str]:
    for served in told.models:
        many = "verifier" if served.verifiers == 1 else "verifiers"
        yield f"{served.model.name}: {served.verifiers} {many}, texts of up to {served.model.max_length} tokens"
        for drafter in served.drafters:
            fits = f"DOES NOT FIT: {drafter.mismatch}" if drafter.mismatch else "drafts"
            yield f"  {drafter.name} ({drafter.model.name or 'no model'}): {fits}"
        if not served.drafters:
            yield "  no drafter: plain decoding"
