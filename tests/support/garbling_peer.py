"""A peer that answers some of its calls with bytes that are no protobuf, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from slipstream.rpc.server import Register

GARBAGE = b"\xff"


class _Garbling(grpc.aio.ServerInterceptor):
    def __init__(self, methods: tuple[str, ...]) -> None:
        self._methods = methods

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if details.method.rpartition("/")[2] in self._methods:
            return handler._replace(response_serializer=lambda message: GARBAGE)
        return handler


@asynccontextmanager
async def garbling(*services: Register, methods: tuple[str, ...]) -> AsyncIterator[str]:
    """Its address; `methods` are those by whose names every message goes out as GARBAGE."""
    server = grpc.aio.server(interceptors=[_Garbling(methods)])
    for register in services:
        register(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
