"""What one end of a stream has to say: everything that was put since the last frame, cut into frames."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from slipstream.errors import InvalidArgument, ResourceExhausted, Unavailable
from slipstream.rpc.channel import MAX_MESSAGE_BYTES


class SizedMessage(Protocol):
    """A protobuf message, as far as a link cares."""

    def ByteSize(self) -> int: ...


Item = TypeVar("Item", bound=SizedMessage)

CAPACITY = 65_536
"""Items an outbox holds: some seconds of a full link. A peer further behind is not reading."""
FRAME_BYTES = MAX_MESSAGE_BYTES // 2
"""Most of one frame; a single item may be larger, up to what gRPC lets through."""


@dataclass(slots=True)
class ByteCounter:
    """Bytes of frames."""

    sent: int = 0
    received: int = 0

    def went(self, frame: Any) -> None:
        self.sent += frame.ByteSize()

    def came(self, frame: Any) -> None:
        self.received += frame.ByteSize()

    def told(self, peer: str) -> dict[tuple[str, ...], float]:
        """By the labels of the metric `slipstream_link_bytes_total`."""
        return {(peer, "sent"): self.sent, (peer, "received"): self.received}


class SendQueue(Generic[Item]):
    """What one end has to say. `put` never blocks; `take` waits for something and returns all of it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._items: list[Item] = []
        self._filled = asyncio.Event()
        self._overflown = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Raises ResourceExhausted when the peer is `capacity` items behind; Unavailable when the stream is over."""
        if self._closed:
            raise Unavailable("the stream is closed; open the session again.")
        if len(self._items) >= self._capacity:
            self._overflown.set()
            raise _slow_peer()
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[Item]:
        """Everything put since the last take, in order; empty only after `close`."""
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


def frames(items: list[Item]) -> Iterator[list[Item]]:
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


def check_count(items: Sized) -> None:
    """Of one frame. Raises InvalidArgument for more than an outbox holds: nobody who keeps to the rules can send it."""
    if len(items) > CAPACITY:
        raise InvalidArgument(f"a frame holds more than {CAPACITY} commands; send less at once.")


def _slow_peer() -> ResourceExhausted:
    return ResourceExhausted("the peer does not read its stream; reconnect.", reason="SLOW_PEER")
