"""Serving: one bootstrap for every role, and the one interceptor that turns exceptions into statuses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_status import rpc_status

from slipstream.client import MAX_MESSAGE_BYTES, error_of
from slipstream.errors import (
    KV_TOO_SMALL,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
    code_number,
)
from slipstream.telemetry.labels import Names

log = logging.getLogger(__name__)

ERROR_DOMAIN = "slipstream"
RETRY_S = 1.0
"""What callers are told where nobody knows better."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # two processes on one port would silently share its connections
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # What a connection may cost before anything is asked of its owner.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.http2.max_ping_strikes", 2),
)
MOST_REASONS = 64
"""Of errors that are counted apart."""
MAX_ERROR_BYTES = 1024
"""Of a sentence that callers are told. It may quote them, and travels as metadata, which peers take little of."""

Register = Callable[[grpc.aio.Server], None]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Authorise = Callable[[str, Context], None]
"""(method, context): returns where the call may go on, else raises a typed error. Asked before anything is read."""

HEALTH = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""What health checks name that would restart the process: it serves for as long as its loop answers, whatever its load
and its peers. Those without a name ask whether to send work."""


def anybody(method: str, context: Context) -> None:
    """For ports that only trusted peers reach."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who gets in at a port."""

    credentials: grpc.ServerCredentials | None = None
    """None: plaintext."""
    authorise: Authorise = anybody


class Server:
    """A gRPC server with health. `start` binds, `stop` drains; the health service is told by `serving`."""

    def __init__(
        self, services: Sequence[Register], access: Access | None = None, options: Mapping[str, int] | None = None
    ) -> None:
        """`options`: of gRPC, besides SERVER_OPTIONS or instead of them."""
        access = access or Access()
        self._credentials = access.credentials
        interceptor = ErrorInterceptor(access.authorise)
        self.errors = interceptor.errors
        self._server = grpc.aio.server(
            interceptors=[interceptor],
            options=tuple((dict(SERVER_OPTIONS) | dict(options or {})).items()),
        )
        self._probes: grpc.aio.Server | None = None
        self._health = HealthServicer()
        self._ending = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for register in services:
            register(self._server)
        self.address = self.health_address = self.metrics_address = ""

    async def start(self, listen: str, health_listen: str = "") -> str:
        """Bind HOST:PORT (port 0 picks a free one) and return the address bound. Raises Unavailable.

        `health_listen`: one more address, in plaintext, for the health service alone: probes have no certificates.
        """
        await self.serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self.address = _bind(self._server, listen, self._credentials)
        if health_listen:
            self._probes = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            self.health_address = _bind(self._probes, health_listen, None)
            await self._probes.start()
        await self._server.start()
        return self.address

    @property
    def announcement(self) -> str:
        """The line that a role prints when it can serve."""
        others = {"health": self.health_address, "metrics": self.metrics_address}
        return " ".join([f"ready grpc={self.address}", *(f"{name}={at}" for name, at in others.items() if at)])

    async def serving(self, ready: bool) -> None:
        """Tell health checks whether to send work here."""
        ready = ready and not self._ending
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", state)

    async def stop(self, grace_s: float) -> None:
        self._ending = True
        await self.serving(False)
        await self._server.stop(grace_s)
        if self._probes is not None:
            await self._probes.stop(None)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {listen}; choose another address or port 0.") from error
    return f"{listen.rpartition(':')[0]}:{port}"


END_WITH_PARENT = "SLIPSTREAM_END_WITH_PARENT"
"""Set to 1 for processes of `slipstream serve`: killed without a word, it leaves none behind."""


async def until_signal(with_parent: bool = False) -> None:
    """Return when the process is asked to end (SIGTERM or SIGINT), or lost the parent it was to end with."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    parent = os.getppid() if with_parent or os.environ.get(END_WITH_PARENT) == "1" else None
    while not asked.is_set() and parent in (None, os.getppid()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), 1.0)


def run(role: str, serving: Coroutine[Any, Any, None]) -> None:
    """Run a role to its end, `explained`."""
    with explained(role):
        asyncio.run(serving)


@contextlib.contextmanager
def explained(role: str) -> Iterator[None]:
    """A typed error that stops a role is one sentence and exit status 1, not a traceback."""
    try:
        yield
    except (SlipstreamError, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, SlipstreamError):
            raise
        sys.exit(f"{role}: {first.message}")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Asks `authorise` before every call. Every SlipstreamError, its own too, becomes its status with an ErrorInfo;
    anything else becomes INTERNAL and is logged."""

    def __init__(self, authorise: Authorise = anybody) -> None:
        self._authorise = authorise
        self._reasons = Names(MOST_REASONS)
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
            told = _typed(error)
            self.errors[details.method.strip("/"), told.code.name, self._reasons(told.reason)] += 1
            status = rpc_status.to_status(_status(told))
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
