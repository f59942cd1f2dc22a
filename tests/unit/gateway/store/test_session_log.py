"""A session's log: strict waits, relaxed follows, and both write the same things in the same order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_log import SessionLog, WriteBehindQueue
from gateway.store.session_store import SessionRecord
from slipstream.errors import Aborted, Unavailable

RECORD = SessionRecord(id="s", epoch=1, params=b"p", prompt_length=2, tokens=(1, 2))


class Fragile(MemoryStore):
    """Away while `down`; loses the reply of every second append that it carried out."""

    down = False
    calls = 0

    async def append(self, *arguments: Any) -> None:
        if self.down:
            raise Unavailable("away")
        await super().append(*arguments)
        self.calls += 1
        if self.calls % 2:
            raise Unavailable("the reply was lost")


def store() -> Fragile:
    return Fragile(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)


async def write(log: SessionLog) -> None:
    await log.create()
    await log.append([3, 4, 5])
    await log.append([6])
    await log.raise_epoch()
    await log.truncate(4)
    await log.append([7])
    await log.finish(b"done")


async def test_strict_writes_survive_lost_replies() -> None:
    there = store()
    await write(SessionLog(there, RECORD, write_behind=None, grace_s=5))
    read = await there.read("s")
    assert (read.tokens, read.epoch, read.outcome) == ((1, 2, 3, 4, 7), 3, b"done")


async def test_strict_gives_up_after_its_grace_and_then_waits_no_more() -> None:
    there = store()
    log = SessionLog(there, RECORD, write_behind=None, grace_s=0.05)
    await log.create()
    there.down = True
    for _ in range(2):
        with pytest.raises(Unavailable):
            await log.append([3])


async def test_relaxed_writes_wait_for_the_store_in_order() -> None:
    there, write_behind = store(), WriteBehindQueue()
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(write_behind.run())
        there.down = True
        await write(SessionLog(there, RECORD, write_behind=write_behind, grace_s=5))
        assert (await there.read("s")).tokens == (1, 2)
        there.down = False
        await write_behind.written(5)
        loop.cancel()
    read = await there.read("s")
    assert (read.tokens, read.epoch, read.outcome) == ((1, 2, 3, 4, 7), 3, b"done")


async def test_a_relaxed_session_hears_that_it_was_fenced() -> None:
    memory, write_behind = MemoryBackend(), WriteBehindQueue()
    mine = MemoryStore(memory, owner="me", ttl_s=60, lease_s=0)
    log = SessionLog(mine, RECORD, write_behind=write_behind, grace_s=5)
    await log.create()
    await MemoryStore(memory, owner="other", ttl_s=60, lease_s=60).takeover("s")
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(write_behind.run())
        await log.append([3])
        await write_behind.written(5)
        loop.cancel()
    with pytest.raises(Aborted):
        await log.append([4])
    assert (await mine.read("s")).tokens == (1, 2)


async def test_without_a_store_no_session_begins_whatever_the_durability() -> None:
    class Down(MemoryStore):
        async def create(self, record: SessionRecord) -> None:
            raise Unavailable("away")

    for write_behind in (None, WriteBehindQueue()):
        down = Down(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
        with pytest.raises(Unavailable):
            await SessionLog(down, RECORD, write_behind=write_behind, grace_s=5).create()


class Watched(MemoryStore):
    """Counts renewals; each waits for `gate`."""

    def __init__(self, memory: MemoryBackend) -> None:
        super().__init__(memory, owner="me", ttl_s=60, lease_s=0)
        self.renewals = 0
        self.away = False
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        self.asked.set()
        await self.gate.wait()
        self.renewals += 1
        if self.away:
            raise Unavailable("away")
        await super().renew(session, epoch, length)


async def test_a_lease_is_renewed_and_an_outage_is_told() -> None:
    there = Watched(MemoryBackend())
    log = SessionLog(there, RECORD, write_behind=None, grace_s=5)
    await log.create()
    await log.renew()
    there.away = True
    with pytest.raises(Unavailable):
        await log.renew()
    there.away = False
    await log.renew()
    await log.append([3])
    assert there.renewals == 3


@pytest.mark.parametrize("write_behind", [None, WriteBehindQueue()], ids=["strict", "relaxed"])
async def test_a_renewal_receives_that_another_owner_has_the_session(write_behind: WriteBehindQueue | None) -> None:
    memory = MemoryBackend()
    there = Watched(memory)
    log = SessionLog(there, RECORD, write_behind=write_behind, grace_s=5)
    await log.create()
    taken = await MemoryStore(memory, owner="other", ttl_s=60, lease_s=60).takeover("s", force=True)
    with pytest.raises(Aborted):
        await log.renew()
    assert await there.read("s") == taken


async def test_a_renewal_is_never_overtaken_by_the_next_epoch() -> None:
    """It would be refused, and its session would think itself fenced."""
    there = Watched(MemoryBackend())
    log = SessionLog(there, RECORD, write_behind=None, grace_s=5)
    await log.create()
    there.gate.clear()
    renewal = asyncio.create_task(log.renew())
    await there.asked.wait()
    raising = asyncio.create_task(log.raise_epoch())
    await asyncio.sleep(0.01)
    there.gate.set()
    await asyncio.gather(renewal, raising)
    await log.append([3])
    assert (await there.read("s")).epoch == 2


async def test_a_released_session_is_suspended_and_its_log_is_whole() -> None:
    memory = MemoryBackend()
    log = SessionLog(MemoryStore(memory, owner="me", ttl_s=60, lease_s=60), RECORD, write_behind=None, grace_s=5)
    await log.create()
    await log.append([3])
    memory.entries.clear()
    await log.release()
    other = MemoryStore(memory, owner="other", ttl_s=60, lease_s=60)
    taken = await other.takeover("s")
    assert (taken.tokens, taken.outcome, taken.epoch) == ((1, 2, 3), b"", 2)
    with pytest.raises(Aborted):
        await log.append([4])
    await SessionLog(other, taken, write_behind=None, grace_s=5).append([4])
    assert (await other.read("s")).tokens == (1, 2, 3, 4)
