"""Exceptions of handlers become gRPC statuses, in one interceptor, which also asks who may call."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from slipstream.errors import (
    KV_TOO_SMALL,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
    code_number,
)
from slipstream.rpc.channel import error_of
from slipstream.telemetry.metrics_collector import BoundedLabels

log = logging.getLogger(__name__)

ERROR_DOMAIN = "slipstream"
RETRY_S = 1.0
"""What callers are told where nobody knows better."""
MOST_REASONS = 64
"""Of errors that are counted apart."""
MAX_ERROR_BYTES = 1024
"""Of a sentence that callers are told. It may quote them, and travels as metadata, which peers take little of."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Authorise = Callable[[str, Context], None]
"""(method, context): returns where the call may go on, else raises a typed error. Asked before anything is read."""


def anybody(method: str, context: Context) -> None:
    """For ports that only trusted peers reach."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Asks `authorise` before every call. Every SlipstreamError, its own too, becomes its status with an ErrorInfo;
    anything else becomes INTERNAL and is logged."""

    def __init__(self, authorise: Authorise = anybody) -> None:
        self._authorise = authorise
        self._reasons = BoundedLabels(MOST_REASONS)
        self.errors: Counter[tuple[str, ...]] = Counter()
        """What callers were told, by method, code and reason."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None

        def enter(context: Context) -> None:
            self._authorise(details.method, context)

        async def abort(context: Context, error: Exception) -> None:
            if isinstance(error, grpc.aio.AbortError):
                raise error
            typed = _typed(error)
            self.errors[details.method.strip("/"), typed.code.name, self._reasons(typed.reason)] += 1
            status = rpc_status.to_status(_status(typed))
            trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
            await context.abort_with_status(status._replace(trailing_metadata=trailing))

        # One request is parsed behind the door only: whoever does not get in costs no more than its bytes.
        guard, guard_stream = _Guard(enter, abort, handler.request_deserializer), _Guard(enter, abort, None)
        send = handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(guard.one(handler.unary_unary), None, send)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(guard.many(handler.unary_stream), None, send)
        read = handler.request_deserializer
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(guard_stream.one(handler.stream_unary), read, send)
        streams = handler.stream_stream
        guarded = guard_stream.one(streams) if asyncio.iscoroutinefunction(streams) else guard_stream.many(streams)
        return grpc.stream_stream_rpc_method_handler(guarded, read, send)


class _Guard:
    """Around a handler: who may enter, what was asked, and what an exception is called."""

    def __init__(
        self,
        enter: Callable[[Context], None],
        abort: Callable[[Context, Exception], Awaitable[None]],
        parse: Callable[[bytes], Any] | None,
    ) -> None:
        self._enter = enter
        self._abort = abort
        self._parse = parse

    def one(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await behaviour(self._admitted(request, context), context)
            except Exception as error:
                await self._abort(context, error)

        return guarded

    def many(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                answers = behaviour(self._admitted(request, context), context)
                if asyncio.iscoroutine(answers):  # a handler that writes by itself
                    await answers
                    return
                async for answer in answers:
                    yield answer
            except Exception as error:
                await self._abort(context, error)

        return guarded

    def _admitted(self, request: Any, context: Context) -> Any:
        self._enter(context)
        try:
            return request if self._parse is None else self._parse(request)
        except DecodeError as error:
            raise InvalidArgument("the request is no protobuf of this contract; regenerate the client.") from error


def _typed(error: Exception) -> SlipstreamError:
    if isinstance(error, grpc.RpcError):  # of a call that the handler made; as it is, its text would be shown
        return error_of(error)
    if isinstance(error, SlipstreamError):
        return error
    log.error("unexpected exception in a handler", exc_info=error)
    return Internal("an internal error happened; please report it with the time it happened at.")


def _status(error: SlipstreamError) -> status_pb2.Status:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN))
    details = [packed]
    if isinstance(error, (ResourceExhausted, Unavailable)) and error.reason != KV_TOO_SMALL:
        retry = error_details_pb2.RetryInfo()
        wait_s = RETRY_S if error.retry_s is None else error.retry_s
        retry.retry_delay.FromMilliseconds(math.ceil(wait_s * 1000))
        again = any_pb2.Any()
        again.Pack(retry)
        details.append(again)
    code = code_number(error)
    assert code in code_pb2.Code.values()
    message = error.message.encode("utf-8", "replace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore")
    return status_pb2.Status(code=code, message=message, details=details)
