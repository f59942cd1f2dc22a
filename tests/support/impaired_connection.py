"""A TCP connection's way between two parties, as bad as a test wants it to be."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from contextlib import suppress

CHUNK = 1 << 16
MOST_CHUNKS = 16
"""On the line at a time; then the sender has to wait, as it would for a full window."""
LINGER_NOT = struct.pack("ii", 1, 0)
"""A socket closed like this resets its connection."""


class Lane:
    """One direction. TCP repeats what is lost, so a cut loses nothing: it all comes late, the end of a stream too."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = math.inf
        self.passed = 0
        """Bytes that came through."""
        self.held = 0
        """Bytes that stood before a cut, and ends of streams."""
        self._open = asyncio.Event()
        self._open.set()

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    async def passable(self, size: int = 1) -> None:
        """For so many bytes."""
        if not self._open.is_set():
            self.held += size
            await self._open.wait()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All that the reader has, until its end. Raises ConnectionError where no peer takes it."""
        line = asyncio.Queue[tuple[float, bytes]](MOST_CHUNKS)
        async with asyncio.TaskGroup() as ends:
            ends.create_task(self._send(reader, line))
            ends.create_task(self._deliver(line, writer))

    async def _send(self, reader: asyncio.StreamReader, line: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"begin"
        while chunk:
            try:
                chunk = await reader.read(CHUNK)
            except ConnectionError:
                chunk = b""
            await line.put((asyncio.get_running_loop().time() + self.delay_s, chunk))

    async def _deliver(self, line: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, chunk = await line.get()
            await asyncio.sleep(max(due - clock(), len(chunk) / self.bytes_per_s))
            await self.passable(max(1, len(chunk)))
            if not chunk:
                with suppress(OSError, NotImplementedError):  # no peer is left; TLS has no half of an end
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()
            self.passed += len(chunk)


class Way:
    """`there` is from whoever dials to whoever was dialled, `back` is what comes from there."""

    def __init__(self) -> None:
        self.there, self.back = Lane(), Lane()
        self.resets = 0
        """Connections that were broken."""
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def lanes(self) -> list[Lane]:
        return [self.there, self.back]

    @property
    def connections(self) -> int:
        return len(self._writers) // 2

    async def cut(self, *lanes: Lane) -> None:
        """Both lanes, or those named; new connections are not made either. Returns once it has held something up."""
        for lane in lanes or self.lanes:
            lane.cut()
        before = self.there.held + self.back.held
        async with asyncio.timeout(30):
            while self.there.held + self.back.held == before:
                await asyncio.sleep(0.005)

    def slow(self, delay_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        """Each direction."""
        for lane in self.lanes:
            lane.delay_s, lane.bytes_per_s = delay_s, bytes_per_s

    def heal(self) -> None:
        self.slow()
        for lane in self.lanes:
            lane.heal()

    def reset(self) -> None:
        """Every connection breaks at once, for both ends."""
        self.resets += self.connections
        for writer in self._writers:
            _reset(writer)

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        """Carry a connection that was accepted to HOST:PORT, until either end is done with it."""
        await self.there.passable()
        host, _, port = address.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            _reset(writer)
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as lanes:
                lanes.create_task(self.there.carry(reader, far_writer))
                lanes.create_task(self.back.carry(far_reader, writer))
        except* ConnectionError:
            pass
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        writer.transport.abort()
