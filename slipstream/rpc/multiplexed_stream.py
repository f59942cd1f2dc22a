"""Multiplexed streams: one stream for each pair of peers, one frame a step for all their sessions.

Both ends write through an `SendQueue`: whatever was said between two writes goes out as one frame, so a busy link sends
fewer, bigger frames by itself. The dialling end is a `MultiplexedStream`, which reconnects; the serving end calls
`serve`. Neither ever waits for its peer: an outbox that overflows means a peer that does not read, and breaks the
stream, never the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from slipstream.concurrency import Backoff
from slipstream.errors import Internal, InvalidArgument, SlipstreamError, Unavailable
from slipstream.rpc.channel import HANDSHAKE, error_of, parsed
from slipstream.rpc.send_queue import ByteCounter, SendQueue, SizedMessage, frames

log = logging.getLogger(__name__)

Item = TypeVar("Item", bound=SizedMessage)
Frame = TypeVar("Frame")
Request = TypeVar("Request")
Response = TypeVar("Response")
Request_contra = TypeVar("Request_contra", contravariant=True)
Response_co = TypeVar("Response_co", covariant=True)
Frame_contra = TypeVar("Frame_contra", contravariant=True)


class StreamListener(Protocol[Frame_contra]):
    """Whom a link reports to. All are plain functions: a listener that had to be awaited could stall its peers."""

    def connected(self) -> None: ...

    def receive(self, frame: Frame_contra) -> None: ...

    def lost(self, error: SlipstreamError) -> None: ...


class StreamCall(Protocol[Request_contra, Response_co]):
    """The part of grpc.aio's StreamStreamCall that a link uses."""

    async def wait_for_connection(self) -> None: ...

    async def write(self, request: Request_contra) -> None: ...

    async def read(self) -> Response_co: ...

    def cancel(self) -> bool: ...


class MultiplexedStream(Generic[Item, Request, Response]):
    """The dialling end: keeps one stream open to a peer for as long as `run` runs.

    `connect` opens the stream, `pack` makes one frame of the items said since the last. After `lost`, nothing that was
    sent before may be believed to have arrived: the owner opens its sessions again when `connected` is called.
    """

    def __init__(
        self,
        connect: Callable[[], StreamCall[Request, Response]],
        pack: Callable[[list[Item]], Request],
        listener: StreamListener[Response],
        *,
        max_backoff_s: float = 2.0,
        traffic: ByteCounter | None = None,
    ) -> None:
        self._connect = connect
        self._pack = pack
        self._listener = listener
        self._backoff = Backoff(most_s=max_backoff_s)
        self._traffic = traffic or ByteCounter()
        self._outbox: SendQueue[Item] | None = None
        self._call: StreamCall[Request, Response] | None = None

    @property
    def up(self) -> bool:
        return self._outbox is not None

    def send(self, item: Item) -> None:
        """Say something. Raises Unavailable while there is no stream, ResourceExhausted when the peer is stuck."""
        if self._outbox is None:
            raise Unavailable("the peer is not connected; try again.")
        self._outbox.put(item)

    def drop(self) -> None:
        """Give the present stream up; `run` reports it lost and connects again."""
        if self._outbox is not None and self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Connect, and again with jittered backoff after every loss, until cancelled.

        The backoff grows with every stream that did not last, so a peer that ends them at once is not dialled forever.
        """
        backoff, clock = self._backoff, asyncio.get_running_loop().time
        while True:
            began = clock()
            error = await self._converse()
            if self.up and clock() - began > backoff.most_s:
                backoff.reset()
            if self._outbox is not None:
                self._outbox = None
                self._report_lost(error)
            elif error.reason == HANDSHAKE and not backoff.failures:
                log.error("a stream cannot be opened: %s", error.message)
            await backoff.wait()

    def _report_lost(self, error: SlipstreamError) -> None:
        try:
            self._listener.lost(error)
        except Exception as failure:
            log.error("a listener failed on a lost stream", exc_info=failure)

    async def _converse(self) -> SlipstreamError:
        """One stream from its connection to its end; returns why it ended. `up` tells whether it ever connected."""
        call: StreamCall[Request, Response] | None = None
        try:
            call = self._call = self._connect()
            await call.wait_for_connection()
            await self._talk(call)
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            return Unavailable("the stream was given up.")  # a dropped call raises what a cancelled task does
        except Exception as failure:
            if _being_cancelled():  # a task group forgets a cancellation that meets a failure
                raise asyncio.CancelledError from failure
            return _cause(failure)
        finally:
            if call is not None:
                call.cancel()
        return Unavailable("the peer ended the stream.")

    async def _talk(self, call: StreamCall[Request, Response]) -> None:
        self._outbox = outbox = SendQueue[Item]()
        self._listener.connected()
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._write(call, outbox)), tasks.create_task(outbox.overflow())]
            await self._read(call)
            for other in others:
                other.cancel()

    async def _write(self, call: StreamCall[Request, Response], outbox: SendQueue[Item]) -> None:
        # A write on a finished stream raises InvalidStateError; the reader has the true cause. A write during which the
        # stream ends raises INTERNAL, and gRPC forgets the cause.
        try:
            await _write(outbox, self._pack, self._traffic, call.write)
        except asyncio.InvalidStateError:
            pass
        except grpc.RpcError as error:
            raise Unavailable("the stream broke while something was said.") from error

    async def _read(self, call: StreamCall[Request, Response]) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._traffic.came(parsed(frame))
            self._listener.receive(frame)


async def _write(
    outbox: SendQueue[Item],
    pack: Callable[[list[Item]], Frame],
    traffic: ByteCounter,
    write: Callable[[Frame], Awaitable[None]],
) -> None:
    """Everything that is said, until the outbox is closed."""
    while items := await outbox.take():
        for batch in frames(items):
            frame = pack(batch)
            traffic.went(frame)
            await write(frame)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _cause(error: BaseException) -> SlipstreamError:
    """Why a stream broke. An exception that nobody foresaw breaks one stream, not the process, and is logged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.RpcError):
        return error_of(error)
    if isinstance(error, SlipstreamError):
        return error
    if isinstance(error, DecodeError):
        return InvalidArgument("a frame is no protobuf of this contract.")
    log.error("a stream's owner failed; the stream is broken off", exc_info=error)
    return Internal("the stream's owner failed; open the stream again.")


async def serve(
    requests: AsyncIterator[Request],
    context: grpc.aio.ServicerContext[Request, Response],
    outbox: SendQueue[Item],
    receive: Callable[[Request], None],
    pack: Callable[[list[Item]], Response],
    traffic: ByteCounter | None = None,
) -> None:
    """The serving end: hand every request to `receive`, send what is put in `outbox`, until the peer leaves."""
    traffic = traffic or ByteCounter()
    await context.send_initial_metadata(())  # tells the dialling end that it is connected

    async def write() -> None:
        try:
            await _write(outbox, pack, traffic, context.write)
        except grpc.aio.InternalError as error:  # so gRPC says that the peer is gone
            raise Unavailable("the peer left while something was said to it.") from error

    try:
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(outbox.overflow())
            writer = tasks.create_task(write())
            async for request in requests:
                traffic.came(request)
                receive(request)
            outbox.close()
            await writer
            guard.cancel()
    except Exception as failure:
        raise _cause(failure) from failure
