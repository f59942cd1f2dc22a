"""The faults that the other tests rely on are faults, and none of them changes what TCP promises."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.network import Network
from tests.way import Lane, Way

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Way, Ends]]:
    """A connection to a server that says everything again, and the way that it takes."""

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
    network = Network(lambda: {"me": os.getpid()})
    host, _, port = (await network.door("echo", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield network.way("me", "echo"), (reader, writer)
    finally:
        writer.close()
        await network.close()
        server.close()


@pytest.mark.parametrize("direction", ["there", "back", "both"])
async def test_a_cut_way_carries_nothing_until_it_is_healed_and_loses_nothing(direction: str) -> None:
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


async def test_a_cut_way_makes_no_new_connection() -> None:
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


async def test_a_slow_way_takes_its_time_and_keeps_the_order() -> None:
    async with echo() as (way, (reader, writer)):
        said = os.urandom(100_000)
        for settings in ({"delay_s": 0.05}, {"bytes_per_s": 1e6}):
            way.slow(**settings)
            began = time.monotonic()
            writer.write(said)
            assert await reader.readexactly(len(said)) == said
            assert time.monotonic() - began >= 0.1


async def test_parties_have_ways_of_their_own() -> None:
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
