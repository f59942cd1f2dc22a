"""Server reflection for tools such as grpcurl: v1 beside v1alpha, which have the same messages, and methods by name."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection import SERVICE_NAME

V1 = "grpc.reflection.v1.ServerReflection"
"""Newer tools ask for it first. The library has no stubs of it."""


class ReflectionService(ReflectionServicer):  # type: ignore[misc]  # the library has no types
    """Describes `services` and what they use; `others` are listed with them."""

    def __init__(self, services: Sequence[ServiceDescriptor], others: Sequence[str] = ()) -> None:
        super().__init__([*(service.full_name for service in services), *others, SERVICE_NAME])
        self._services = {method.full_name: service.full_name for service in services for method in service.methods}
        """The service of each method, by its full name: a descriptor pool finds no methods."""

    def register(self, server: grpc.aio.Server) -> None:
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(self, server)
        method = grpc.stream_stream_rpc_method_handler(
            self.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))

    async def ServerReflectionInfo(
        self, request_iterator: AsyncIterable[reflection_pb2.ServerReflectionRequest], context: Any
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        async for response in super().ServerReflectionInfo(self._known(request_iterator), context):
            yield response

    async def _known(
        self, requests: AsyncIterable[reflection_pb2.ServerReflectionRequest]
    ) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        async for request in requests:
            if service := self._services.get(request.file_containing_symbol):
                request.file_containing_symbol = service
            yield request
