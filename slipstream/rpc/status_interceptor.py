"""One gRPC server interceptor: authorises each call, and turns exceptions of handlers into gRPC statuses."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from slipstream.errors import (
    MESSAGE_TOO_LARGE,
    NOT_PROTOBUF,
    InvalidArgument,
    SlipstreamError,
    code_number,
    message_to_send,
    retry_delay_s,
    typed_error,
)
from slipstream.rpc.channel import error_of
from slipstream.telemetry.metrics_collector import BoundedLabels

ERROR_DOMAIN = "slipstream"
UNKNOWN_METHOD = "UNKNOWN_METHOD"
MOST_REASONS = 128
"""Distinct reasons in the error counters."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Authorise = Callable[[str, Context], Awaitable[Any]]
"""(method, context): returns the context that the handler is called with if the call may go on, else raises a typed
error. Called before anything is read."""
Parse = Callable[[bytes], Any]
Read = Callable[[str, Parse | None, bytes, Any], Awaitable[tuple[Any, Any]]]
"""(method, its parser, request, context of `Authorise`): returns the request, parsed if there is a parser, and the
context that the handler is called with. Raises DecodeError."""


Receiving = Callable[[Any], AbstractAsyncContextManager[None]]
"""Context of `Authorise` -> what is held while the call's single request is received. Entering it may wait, or raise a
typed error."""


async def allow_all(method: str, context: Context) -> Context:
    """Authorises every call, for ports that only trusted peers reach."""
    return context


async def parse_at_once(method: str, parse: Parse | None, request: bytes, context: Any) -> tuple[Any, Any]:
    """Reads a request on the event loop."""
    return (request if parse is None else parse(request)), context


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Calls `authorise` before every handler. A SlipstreamError, that of `authorise` too, becomes its status with an
    ErrorInfo; any other exception becomes INTERNAL and is logged. A method that the server lacks is UNIMPLEMENTED."""

    def __init__(
        self,
        authorise: Authorise = allow_all,
        most_bytes: int | None = None,
        read: Read | None = None,
        receiving: Receiving | None = None,
    ) -> None:
        """`most_bytes`: of a request. Less than gRPC lets through, whose own error has no limit in it. `read`: of
        single requests; None: `parse_at_once`. Handlers may return answers that are serialised, as bytes."""
        self._authorise = authorise
        self._read = read or parse_at_once
        self._receiving = receiving or (lambda entered: nullcontext())
        self._most_bytes = most_bytes
        self._reasons = BoundedLabels(MOST_REASONS)
        self.errors: Counter[tuple[str, ...]] = Counter()
        """Errors that were sent, by method, code and reason."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return _UNKNOWN

        async def enter(context: Context) -> Any:
            return await self._authorise(details.method, context)

        async def abort(context: Context, error: Exception) -> None:
            if isinstance(error, grpc.aio.AbortError):
                raise error
            # The text of a call that the handler made would be sent if the call's error were not converted.
            typed = error_of(error) if isinstance(error, grpc.RpcError) else typed_error(error)
            _forget_frames(error)
            self.errors[details.method.strip("/"), typed.code.name, self._reasons(typed.reason)] += 1
            status = rpc_status.to_status(_status(typed))
            trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
            await context.abort_with_status(status._replace(trailing_metadata=trailing))

        # gRPC receives a single request before it calls anything, but none of a stream: as a stream of one, it is
        # received and parsed after authorisation only. A refused caller costs what flow control lets it send unread.
        parse = handler.request_deserializer
        guard = _Guard(enter, abort, partial(self._receive, partial(self._read, details.method, parse)))
        guard_stream = _Guard(enter, abort, None)
        send = _serialising(handler.response_serializer)
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(guard.one(handler.unary_unary), None, send)
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(guard.many(handler.unary_stream), None, send)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(guard_stream.one(handler.stream_unary), parse, send)
        streams = handler.stream_stream
        guarded = guard_stream.one(streams) if asyncio.iscoroutinefunction(streams) else guard_stream.many(streams)
        return grpc.stream_stream_rpc_method_handler(guarded, parse, send)

    async def _receive(
        self, read: Callable[[bytes, Any], Awaitable[tuple[Any, Any]]], context: Context, entered: Any
    ) -> tuple[Any, Any]:
        """The call's single request, parsed, and the context that its handler is called with."""
        async with self._receiving(entered):
            request = await context.read()
        if request is grpc.aio.EOF:
            raise InvalidArgument("the call has no request; send one.", reason=NOT_PROTOBUF)
        if self._most_bytes is not None and len(request) > self._most_bytes:
            raise InvalidArgument(
                f"the request has {len(request)} bytes; send at most {self._most_bytes}.",
                reason=MESSAGE_TOO_LARGE,
                numbers={"bytes": len(request), "limit": self._most_bytes},
            )
        try:
            return await read(request, entered)
        except DecodeError as error:
            raise InvalidArgument(
                "the request is no protobuf of this contract; regenerate the client.", reason=NOT_PROTOBUF
            ) from error


Single = Callable[[Context, Any], Awaitable[tuple[Any, Any]]]


class _Guard:
    """Wraps a handler: authorises the call, receives and parses a single request, and aborts with the status of an
    exception."""

    def __init__(
        self,
        enter: Callable[[Context], Awaitable[Any]],
        abort: Callable[[Context, Exception], Awaitable[None]],
        single: Single | None,
    ) -> None:
        """`single`: receives a single request; None: the handler takes a stream of them."""
        self._enter = enter
        self._abort = abort
        self._single = single

    def one(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def guarded(requests: Any, context: Context) -> Any:
            try:
                return await behaviour(*await self._admitted(requests, context))
            except Exception as error:
                await self._abort(context, error)

        return guarded

    def many(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(requests: Any, context: Context) -> AsyncIterator[Any]:
            try:
                answers = behaviour(*await self._admitted(requests, context))
                if asyncio.iscoroutine(answers):  # a handler that writes to the context itself
                    await answers
                    return
                async for answer in answers:
                    yield answer
            except Exception as error:
                answers = None
                await self._abort(context, error)

        return guarded

    async def _admitted(self, requests: Any, context: Context) -> tuple[Any, Any]:
        entered = await self._enter(context)
        return (requests, entered) if self._single is None else await self._single(context, entered)


def _serialising(serialise: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """For answers of which some are serialised."""
    if serialise is None:
        return lambda answer: answer
    return lambda answer: answer if isinstance(answer, bytes) else serialise(answer)


async def _unknown(requests: AsyncIterator[Any], context: Context) -> None:
    """Any kind of call to a method that is not served: a stream of requests is not read."""
    details = _packed([error_details_pb2.ErrorInfo(reason=UNKNOWN_METHOD, domain=ERROR_DOMAIN)])
    code, sentence = grpc.StatusCode.UNIMPLEMENTED, "this server has no such method; reflection lists what it has."
    await context.abort_with_status(
        rpc_status.to_status(status_pb2.Status(code=code.value[0], message=sentence, details=details))
    )


_UNKNOWN: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_unknown)


def _forget_frames(error: BaseException | None) -> None:
    """gRPC keeps the exception of an aborted call in a circle, which the garbage collector finds much later: with its
    frames, which hold the request, refused calls would fill the memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _status(error: SlipstreamError) -> status_pb2.Status:
    sentence = message_to_send(error)
    numbers = {name: f"{value:.17g}" for name, value in error.numbers.items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=numbers)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=sentence)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    wait_s = retry_delay_s(error)
    if wait_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(wait_s * 1000))
        details.append(retry)
    code = code_number(error)
    assert code in code_pb2.Code.values()
    return status_pb2.Status(code=code, message=sentence, details=_packed(details))


def _packed(details: Sequence[Message]) -> list[any_pb2.Any]:
    packed = [any_pb2.Any() for _ in details]
    for each, detail in zip(packed, details, strict=True):
        each.Pack(detail, deterministic=True)  # maps have no order of their own
    return packed
