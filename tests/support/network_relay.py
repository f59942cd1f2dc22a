"""What lies between processes: every server behind a door of its own, and a way of its own for each pair."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.impaired_connection import Way

ESTABLISHED = "01"


class Network:
    """Identifies the dialling party by the process that holds the other end of the connection, so that parties
    which know a server by one address still have ways of their own."""

    def __init__(self, parties: Callable[[], Mapping[str, int]]) -> None:
        """`parties`: the process of each party that is there now."""
        self._parties = parties
        self._ways: dict[tuple[str, str], Way] = {}
        self._doors: list[asyncio.Server] = []
        self._joined: set[asyncio.Task[None]] = set()

    def way(self, dialler: str, server: str) -> Way:
        return self._ways.setdefault((dialler, server), Way())

    async def door(self, server: str, address: str, tls: ssl.SSLContext | None = None) -> str:
        """The HOST:PORT by which others know the server at `address`; with `tls` they speak TLS as far as here."""

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            dialler = self._dialler(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1])
            try:
                if dialler is not None:  # else it left at once, or is no party
                    await self.way(dialler, server).join(reader, writer, address)
            finally:
                writer.transport.abort()

        def arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(join(reader, writer))
            self._joined.add(task)
            task.add_done_callback(self._joined.discard)

        door = await asyncio.start_server(arrive, "127.0.0.1", 0, ssl=tls)
        self._doors.append(door)
        return f"127.0.0.1:{door.sockets[0].getsockname()[1]}"

    def heal(self) -> None:
        for way in self._ways.values():
            way.heal()

    async def close(self) -> None:
        for door in self._doors:
            door.close()
        for task in self._joined:
            task.cancel()
        await asyncio.gather(*self._joined, return_exceptions=True)

    def _dialler(self, near: int, far: int) -> str | None:
        inode = _inode(near, far)
        return next((name for name, pid in self._parties().items() if inode in _sockets(pid)), None)


def open_files(pid: int) -> list[str]:
    """What each descriptor of a process is."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def _sockets(pid: int) -> set[str]:
    try:
        return {name[len("socket:[") : -1] for name in open_files(pid) if name.startswith("socket:[")}
    except FileNotFoundError:  # it has ended
        return set()


def _inode(near: int, far: int) -> str:
    """Inode of the connection from one port here to another: one port alone may belong to several."""
    for table in ("tcp", "tcp6"):  # gRPC has IPv6 sockets for IPv4 addresses
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            ports = [int(address.rpartition(":")[2], 16) for address in (local, remote)]
            if ports == [near, far] and state == ESTABLISHED:
                return rest[5]
    return ""
