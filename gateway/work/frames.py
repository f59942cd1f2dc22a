"""Jobs and results on the socket between a gateway and one of its working processes: a head in JSON, and bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Generator
from typing import Any, NamedTuple

_SIZES = struct.Struct("!II")
Buffer = bytes | bytearray | memoryview


class JobFrame(NamedTuple):
    head: dict[str, Any]
    """A few names and numbers; no text of a client's."""
    body: Buffer = b""


def send(line: socket.socket, frame: JobFrame) -> None:
    """For the process at the other end, which has nothing else to do. Raises OSError."""
    for part in _written(frame):
        line.sendall(part)


def receive(line: socket.socket) -> JobFrame | None:
    """None where the other end is gone. Raises OSError."""
    reading = _read()
    wanted = next(reading)
    while True:
        try:
            wanted = reading.send(line.recv_into(wanted))
        except StopIteration as done:
            frame: JobFrame | None = done.value
            return frame


async def send_async(line: socket.socket, frame: JobFrame) -> None:
    """Raises OSError."""
    for part in _written(frame):
        await asyncio.get_running_loop().sock_sendall(line, part)


async def receive_async(line: socket.socket) -> JobFrame | None:
    """None where the other end is gone. Raises OSError."""
    loop, reading = asyncio.get_running_loop(), _read()
    wanted = next(reading)
    while True:
        try:
            wanted = reading.send(await loop.sock_recv_into(line, wanted))
        except StopIteration as done:
            frame: JobFrame | None = done.value
            return frame


def _written(frame: JobFrame) -> tuple[Buffer, Buffer]:
    head = json.dumps(frame.head).encode()
    return _SIZES.pack(len(head), len(frame.body)) + head, frame.body


def _read() -> Generator[memoryview, int, JobFrame | None]:
    """Yields where the next bytes go, and is sent how many came: 0 where the other end is gone."""
    sizes = yield from _exactly(_SIZES.size)
    if sizes is None:
        return None
    head_size, body_size = _SIZES.unpack(sizes)
    head = yield from _exactly(head_size)
    body = yield from _exactly(body_size)
    return None if head is None or body is None else JobFrame(json.loads(head), body)


def _exactly(size: int) -> Generator[memoryview, int, bytearray | None]:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        got = yield view
        if not got:
            return None
        view = view[got:]
    return found
