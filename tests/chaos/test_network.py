"""The faults that the other tests rely on are faults, and none of them changes what TCP promises."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.impaired_connection import Lane, Way
from tests.support.network_relay import Network

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
DIALLER = """
import socket, sys
own, door = map(int, sys.argv[1:])
with socket.socket() as line:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    line.bind(("127.0.0.1", own))
    line.connect(("127.0.0.1", door))
    line.sendall(b"x")
    assert line.recv(1) == b"x"
"""
"""Program of a process that says one byte from one port to another."""


@asynccontextmanager
async def echo_door(parties: dict[str, int]) -> AsyncIterator[tuple[Network, int]]:
    """A network of these parties, and the port of its door to a server that says everything again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
            writer.write_eof()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    network = Network(lambda: parties)
    door = await network.door("echo", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield network, int(door.rpartition(":")[2])
    finally:
        await network.close()
        server.close()


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Way, Ends]]:
    """A connection to such a server, and the way that it takes."""
    async with echo_door({"me": os.getpid()}) as (network, door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door)
        try:
            yield network.way("me", "echo"), (reader, writer)
        finally:
            writer.close()


@pytest.mark.parametrize("direction", ["there", "back", "both"])
async def test_a_cut_link_carries_nothing_until_it_is_healed_and_loses_nothing(direction: str) -> None:
    async with echo() as (way, (reader, writer)):
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        cut: tuple[Lane, ...] = () if direction == "both" else (getattr(way, direction),)
        cutting = asyncio.create_task(way.cut(*cut))
        writer.write(b"while")
        writer.write_eof()
        await cutting
        assert (way.there.held > 0) == (direction != "back")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        way.heal()
        assert await reader.read() == b"while"


async def test_a_cut_link_accepts_no_new_connection_until_it_is_healed() -> None:
    async with echo() as (way, (_, writer)):
        host, port = writer.get_extra_info("peername")
        cutting = asyncio.create_task(way.cut())
        reader, other = await asyncio.open_connection(host, port)
        await cutting
        assert way.connections <= 1
        other.write(b"late")
        way.heal()
        assert await reader.readexactly(4) == b"late"
        other.close()


async def test_a_reset_breaks_both_ends_at_once() -> None:
    async with echo() as (way, (reader, writer)):
        writer.write(b"x")
        await reader.readexactly(1)
        way.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        assert way.resets == 1
        async with asyncio.timeout(60):
            while way.connections:
                await asyncio.sleep(0.001)


async def test_a_slow_link_delays_bytes_and_keeps_their_order() -> None:
    async with echo() as (way, (reader, writer)):
        said = os.urandom(100_000)
        for settings in ({"delay_s": 0.05}, {"bytes_per_s": 1e6}):
            way.slow(**settings)
            began = time.monotonic()
            writer.write(said)
            assert await reader.readexactly(len(said)) == said
            assert time.monotonic() - began >= 0.1


async def test_connections_are_attributed_to_their_process_and_those_of_unknown_processes_are_closed() -> None:
    async with echo() as (way, (reader, writer)):
        writer.write(b"x")
        await reader.readexactly(1)
        assert way.there.passed == way.back.passed == 1

    network = Network(lambda: {"somebody else": os.getppid()})
    door = await network.door("echo", "127.0.0.1:1")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(door.rpartition(":")[2]))
    assert await reader.read() == b"", "nobody knows who dialled"
    writer.close()
    await network.close()


async def test_a_dialling_process_is_not_confused_with_another_one_on_the_same_port() -> None:
    """The kernel gives one port to many connections, as long as they lead to different addresses."""
    parties = {"other": os.getpid()}
    async with echo_door(parties) as (network, door):
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(32)]
        others = [socket.socket() for _ in listeners]
        try:
            port = 0
            for other, listener in zip(others, listeners, strict=True):
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
                port = other.getsockname()[1]
                other.connect(listener.getsockname())
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", DIALLER, str(port), str(door))
            parties["me"] = process.pid
            assert await process.wait() == 0
            assert network.way("me", "echo").back.passed == 1
            assert network.way("other", "echo").back.passed == 0
        finally:
            for each in (*others, *listeners):
                each.close()
