"""Jobs and results on the socket between a gateway and one of its working processes: a head in JSON, and bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any, NamedTuple

_SIZES = struct.Struct("!II")
Buffer = bytes | bytearray | memoryview


class JobFrame(NamedTuple):
    head: dict[str, Any]
    """A few names and numbers; no text of a client's."""
    body: Buffer = b""


def send(line: socket.socket, frame: JobFrame) -> None:
    """For the process at the other end, which has nothing else to do. Raises OSError."""
    head = json.dumps(frame.head).encode()
    line.sendall(_SIZES.pack(len(head), len(frame.body)) + head)
    line.sendall(frame.body)


def receive(line: socket.socket) -> JobFrame | None:
    """None where the other end is gone."""
    sizes = _exactly(line, _SIZES.size)
    if sizes is None:
        return None
    head, body = _SIZES.unpack(sizes)
    parts = _exactly(line, head), _exactly(line, body)
    return None if parts[0] is None or parts[1] is None else JobFrame(json.loads(parts[0]), parts[1])


async def send_async(line: socket.socket, frame: JobFrame) -> None:
    """Raises OSError."""
    loop, head = asyncio.get_running_loop(), json.dumps(frame.head).encode()
    await loop.sock_sendall(line, _SIZES.pack(len(head), len(frame.body)) + head)
    await loop.sock_sendall(line, frame.body)


async def receive_async(line: socket.socket) -> JobFrame | None:
    """None where the other end is gone."""
    sizes = await _exactly_async(line, _SIZES.size)
    if sizes is None:
        return None
    head, body = _SIZES.unpack(sizes)
    parts = await _exactly_async(line, head), await _exactly_async(line, body)
    return None if parts[0] is None or parts[1] is None else JobFrame(json.loads(parts[0]), parts[1])


def _exactly(line: socket.socket, size: int) -> bytearray | None:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        got = line.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return found


async def _exactly_async(line: socket.socket, size: int) -> bytearray | None:
    loop, found = asyncio.get_running_loop(), bytearray(size)
    view = memoryview(found)
    while view:
        try:
            got = await loop.sock_recv_into(line, view)
        except OSError:
            return None
        if not got:
            return None
        view = view[got:]
    return found
