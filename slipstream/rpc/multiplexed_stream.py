"""Multiplexed streams: one gRPC stream for each pair of peers, one frame a step for all their sessions.

Both ends write through a `SendQueue`: whatever is put between two writes goes out as one frame, so a busy stream sends
fewer, bigger frames by itself. An item that no frame can hold is refused when it is put, for sent it would break the
stream of all other sessions. The dialling end is a `MultiplexedStream`, which reconnects; the serving end calls
`serve`. Neither ever waits for its peer: a queue that overflows means a peer that does not read, and breaks the stream,
never the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from slipstream.concurrency import Backoff
from slipstream.errors import (
    MESSAGE_TOO_LARGE,
    NOT_PROTOBUF,
    TOO_MANY_ITEMS,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
)
from slipstream.rpc.channel import HANDSHAKE, MAX_MESSAGE_BYTES, error_of, parsed

log = logging.getLogger(__name__)


class SizedMessage(Protocol):
    """The part of a protobuf message that a send queue uses."""

    def ByteSize(self) -> int: ...


Item = TypeVar("Item", bound=SizedMessage)
Frame = TypeVar("Frame")
Request = TypeVar("Request")
Response = TypeVar("Response")
Request_contra = TypeVar("Request_contra", contravariant=True)
Response_co = TypeVar("Response_co", covariant=True)
Frame_contra = TypeVar("Frame_contra", contravariant=True)

CAPACITY = 65_536
"""Items that a send queue holds: some seconds of a full stream. A peer further behind is not reading."""
FRAME_BYTES = MAX_MESSAGE_BYTES // 2
"""Largest frame of several items; a single item may be larger, up to MAX_ITEM_BYTES."""
MAX_ITEM_BYTES = MAX_MESSAGE_BYTES - 64
"""Largest item: what gRPC lets through, without the item's tag and length in its frame."""


@dataclass(slots=True)
class ByteCounter:
    """Bytes of frames that were sent and received."""

    sent: int = 0
    received: int = 0

    def count_sent(self, frame: Any) -> None:
        self.sent += frame.ByteSize()

    def count_received(self, frame: Any) -> None:
        self.received += frame.ByteSize()

    def by_label(self, peer: str) -> dict[tuple[str, ...], float]:
        """The counts by the labels of the metric `slipstream_link_bytes_total`: peer and direction."""
        return {(peer, "sent"): self.sent, (peer, "received"): self.received}


class SendQueue(Generic[Item]):
    """The items that one end of a stream has yet to send. `put` never blocks."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._items: list[Item] = []
        self._filled = asyncio.Event()
        self._overflown = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Raises ResourceExhausted when the peer is `capacity` items behind; Unavailable when the stream is over;
        InvalidArgument for an item that no frame can hold, which concerns this item alone."""
        if self._closed:
            raise Unavailable("the stream is closed; open the session again.")
        if (size := item.ByteSize()) > MAX_ITEM_BYTES:
            raise InvalidArgument(
                f"the session takes a message of {size} bytes and {MAX_ITEM_BYTES} can be sent; send a shorter prompt "
                "or prediction.",
                reason=MESSAGE_TOO_LARGE,
                numbers={"bytes": size, "limit": MAX_ITEM_BYTES},
            )
        if len(self._items) >= self._capacity:
            self._overflown.set()
            raise _slow_peer()
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[Item]:
        """Wait for an item, and return everything put since the last take, in order; empty only after `close`."""
        if not self._items and not self._closed:
            self._filled.clear()
            await self._filled.wait()
        items, self._items = self._items, []
        return items

    async def overflow(self) -> NoReturn:
        """Raises ResourceExhausted as soon as a put found no room: something was lost, the stream cannot go on."""
        await self._overflown.wait()
        raise _slow_peer()

    def close(self) -> None:
        """No more puts; what is left can still be taken."""
        self._closed = True
        self._filled.set()


def split_frames(items: list[Item]) -> Iterator[list[Item]]:
    """The items in order, cut where a frame would exceed FRAME_BYTES: a thousand long prompts are not one message."""
    batch: list[Item] = []
    size = 0
    for item in items:
        weight = item.ByteSize()
        if batch and size + weight > FRAME_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += weight
    yield batch


def check_command_count(commands: Sized) -> None:
    """Raises InvalidArgument for a frame with more commands than a peer's send queue can hold."""
    if len(commands) > CAPACITY:
        raise InvalidArgument(f"a frame holds more than {CAPACITY} commands; send less at once.", reason=TOO_MANY_ITEMS)


def _slow_peer() -> ResourceExhausted:
    return ResourceExhausted("the peer does not read its stream; reconnect.", reason="SLOW_PEER")


class StreamListener(Protocol[Frame_contra]):
    """Receives what happens on a stream. Plain functions: a listener that had to be awaited could stall its peers."""

    def connected(self) -> None: ...

    def receive(self, frame: Frame_contra) -> None: ...

    def lost(self, error: SlipstreamError) -> None: ...


class StreamCall(Protocol[Request_contra, Response_co]):
    """The part of grpc.aio's StreamStreamCall that is used here."""

    async def wait_for_connection(self) -> None: ...

    async def write(self, request: Request_contra) -> None: ...

    async def read(self) -> Response_co: ...

    def cancel(self) -> bool: ...


class MultiplexedStream(Generic[Item, Request, Response]):
    """The dialling end: keeps one stream open to a peer for as long as `run` runs.

    `connect` opens the stream, `pack` makes one frame of the items put since the last. After `lost`, nothing that was
    sent before may be assumed to have arrived: the owner opens its sessions again when `connected` is called.
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
        self._queue: SendQueue[Item] | None = None
        self._call: StreamCall[Request, Response] | None = None

    @property
    def up(self) -> bool:
        return self._queue is not None

    def send(self, item: Item) -> None:
        """Queue an item. Raises Unavailable while there is no stream, ResourceExhausted when the peer is stuck, and
        InvalidArgument for an item that no frame can hold."""
        if self._queue is None:
            raise Unavailable("the peer is not connected; try again.")
        self._queue.put(item)

    def drop(self) -> None:
        """Break the present stream off; `run` reports it lost and connects again."""
        if self._queue is not None and self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Connect, and again with jittered backoff after every loss, until cancelled.

        The backoff grows with every stream that did not last, so a peer that ends them at once is not dialled forever.
        """
        backoff, clock = self._backoff, asyncio.get_running_loop().time
        while True:
            began = clock()
            error = await self._run_stream()
            if self.up and clock() - began > backoff.most_s:
                backoff.reset()
            if self._queue is not None:
                self._queue = None
                self._report_lost(error)
            elif error.reason == HANDSHAKE and not backoff.failures:
                log.error("a stream cannot be opened: %s", error.message)
            await backoff.wait()

    def _report_lost(self, error: SlipstreamError) -> None:
        try:
            self._listener.lost(error)
        except Exception as failure:
            log.error("a listener failed on a lost stream", exc_info=failure)

    async def _run_stream(self) -> SlipstreamError:
        """One stream from its connection to its end; returns why it ended. `up` is true if it ever connected."""
        call: StreamCall[Request, Response] | None = None
        try:
            call = self._call = self._connect()
            await call.wait_for_connection()
            await self._exchange(call)
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            return Unavailable("the stream was cancelled.")  # a dropped call raises what a cancelled task does
        except Exception as failure:
            if _being_cancelled():  # a task group forgets a cancellation that meets a failure
                raise asyncio.CancelledError from failure
            return _cause(failure)
        finally:
            if call is not None:
                call.cancel()
        return Unavailable("the peer ended the stream.")

    async def _exchange(self, call: StreamCall[Request, Response]) -> None:
        self._queue = queue = SendQueue[Item]()
        self._listener.connected()
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._write(call, queue)), tasks.create_task(queue.overflow())]
            await self._read(call)
            for other in others:
                other.cancel()

    async def _write(self, call: StreamCall[Request, Response], queue: SendQueue[Item]) -> None:
        # A write on a finished stream raises InvalidStateError; the reader has the true cause. A write during which the
        # stream ends raises INTERNAL, and gRPC forgets the cause.
        try:
            await _write(queue, self._pack, self._traffic, call.write)
        except asyncio.InvalidStateError:
            pass
        except grpc.RpcError as error:
            raise Unavailable("the stream broke while a frame was sent.") from error

    async def _read(self, call: StreamCall[Request, Response]) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._traffic.count_received(parsed(frame))
            self._listener.receive(frame)


async def _write(
    queue: SendQueue[Item],
    pack: Callable[[list[Item]], Frame],
    traffic: ByteCounter,
    write: Callable[[Frame], Awaitable[None]],
) -> None:
    """Write everything that is put in the queue, until it is closed."""
    while items := await queue.take():
        for batch in split_frames(items):
            frame = pack(batch)
            traffic.count_sent(frame)
            await write(frame)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _cause(error: BaseException) -> SlipstreamError:
    """The error that broke a stream. An unforeseen exception breaks one stream, not the process, and is logged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.RpcError):
        return error_of(error)
    if isinstance(error, SlipstreamError):
        return error
    if isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError):
        return Unavailable("this end of the stream is being stopped.")  # nothing else is left to read from
    if isinstance(error, DecodeError):
        return InvalidArgument("a frame is no protobuf of this contract.", reason=NOT_PROTOBUF)
    log.error("a stream's owner failed; the stream is broken off", exc_info=error)
    return Internal("the stream's owner failed; open the stream again.")


async def serve(
    requests: AsyncIterator[Request],
    context: grpc.aio.ServicerContext[Request, Response],
    queue: SendQueue[Item],
    receive: Callable[[Request], None],
    pack: Callable[[list[Item]], Response],
    traffic: ByteCounter | None = None,
) -> None:
    """The serving end: hand every request to `receive`, send what is put in `queue`, until the peer leaves."""
    traffic = traffic or ByteCounter()
    await context.send_initial_metadata(())  # with this the dialling end is connected

    async def write() -> None:
        try:
            await _write(queue, pack, traffic, context.write)
        except grpc.aio.InternalError as error:  # how gRPC reports that the peer is gone
            raise Unavailable("the peer closed the stream while a frame was sent.") from error

    try:
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(queue.overflow())
            writer = tasks.create_task(write())
            async for request in requests:
                traffic.count_received(request)
                receive(request)
            queue.close()
            await writer
            guard.cancel()
    except Exception as failure:
        raise _cause(failure) from failure
