"""Requests of a load over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from slipstream.client.client import pieces
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.client.load.runner import Answered, Heard, Send
from slipstream.v1 import gateway_pb2

Requests = Sequence[gateway_pb2.GenerateRequest]


@asynccontextmanager
async def sending_grpc(gateway: GatewayEndpoint, requests: Requests) -> AsyncIterator[Send]:
    """Sends these requests by their index over one channel. Raises what `GatewayEndpoint.channel` raises."""
    async with gateway.channel() as channel:

        async def send(index: int, heard: Heard) -> Answered:
            completion = Completion()
            async for _ in pieces([channel], requests[index], completion):
                heard()
            seen = completion.finished.statistics
            tokens = completion.finished.output_tokens
            return Answered(tokens, seen.rounds, seen.rounds_with_drafts, seen.drafted, seen.accepted)

        yield send
