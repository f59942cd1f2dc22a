"""A session's log: strict waits, relaxed follows, and both write the same things in the same order."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_log import SessionLog
from gateway.store.session_store import SessionRecord
from gateway.store.write_behind import WriteBehindQueue
from slipstream.errors import Aborted, Unavailable

RECORD = SessionRecord(id="s", epoch=1, params=b"p", prompt_length=2, tokens=(1, 2))


class Fragile(MemoryStore):
    """Away while `down`; loses the reply of every second append that it carried out."""

    down = False
    calls = attempts = 0

    async def renew(self, *arguments: Any) -> None:
        raise AssertionError("renewed a lease that writes renew")

    async def append(self, *arguments: Any) -> None:
        self.attempts += 1
        if self.down:
            raise Unavailable("down for now")
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
    with pytest.raises(Unavailable, match="store is away") as first:
        await log.append([3])
    assert first.value.reason == "STORE_UNAVAILABLE"
    attempts = there.attempts
    with pytest.raises(Unavailable, match="down for now"):  # the store's own answer to the one attempt
        await log.append([3])
    assert there.attempts == attempts + 1
    await log.renew()  # it would only add to the trouble: a write is tried again and again


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


async def test_a_relaxed_session_that_was_fenced_is_aborted_at_its_next_write() -> None:
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


async def test_a_lease_is_renewed_and_a_renewal_during_an_outage_fails() -> None:
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


async def test_a_write_behind_a_renewal_that_hangs_waits_no_longer_than_its_grace() -> None:
    there = Watched(MemoryBackend())
    log = SessionLog(there, RECORD, write_behind=None, grace_s=0.05)
    await log.create()
    there.gate.clear()
    renewal = asyncio.create_task(log.renew())
    await there.asked.wait()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(log.append([3]), timeout=30)
    there.gate.set()
    await renewal


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


async def test_a_truncation_with_tokens_and_params_is_restored_as_it_was_written() -> None:
    memory = MemoryBackend()
    there = MemoryStore(memory, owner="me", ttl_s=60, lease_s=60)
    log = SessionLog(there, replace(RECORD, tokens=(1, 2, 2**32 - 1)), write_behind=None, grace_s=5)
    await log.create()
    await log.truncate(2, b"q", [9, 8])
    assert log.length == 4
    assert ((await there.read("s")).tokens, (await there.read("s")).params) == ((1, 2, 9, 8), b"q")
    memory.entries.clear()
    await log.append([7])
    read = await there.read("s")
    assert (read.tokens, read.params, read.epoch, log.length) == ((1, 2, 9, 8, 7), b"q", 2, 5)


async def test_a_release_restores_the_last_writes_that_a_failover_lost() -> None:
    memory = MemoryBackend()
    log = SessionLog(MemoryStore(memory, owner="me", ttl_s=60, lease_s=60), RECORD, write_behind=None, grace_s=5)
    await log.create()
    before = copy.deepcopy(memory.entries)
    await log.append([3])
    memory.entries = before
    await log.release()
    assert (await MemoryStore(memory, owner="other", ttl_s=60, lease_s=60).takeover("s")).tokens == (1, 2, 3)


async def test_a_store_that_loses_everything_at_once_is_unavailable() -> None:
    class Forgetful(MemoryStore):
        async def append(self, *arguments: Any) -> None:
            self._memory.entries.clear()
            await super().append(*arguments)

    there = Forgetful(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    log = SessionLog(there, RECORD, write_behind=None, grace_s=0.05)
    await log.create()
    for sentence in ("store is away", "goes on losing"):
        with pytest.raises(Unavailable, match=sentence) as raised:
            await log.append([3])
        assert raised.value.reason == "STORE_UNAVAILABLE"


async def test_a_relaxed_log_counts_what_is_enqueued_and_what_the_store_took() -> None:
    there, now = store(), [100.0]
    queue = WriteBehindQueue(lambda: now[0])
    log = SessionLog(there, RECORD, write_behind=queue, grace_s=5)
    assert (log.enqueued, log.completed, queue.lag_s) == (0, 0, 0.0)
    await log.create()
    there.down = True
    for token in (3, 4, 5):
        await log.append([token])
        now[0] += 1.0
    await log.renew()  # what is behind renews the lease once it is written
    assert (log.enqueued, log.completed, queue.lag_s) == (3, 0, 3.0)
    assert not await log.catch_up()
    assert (log.enqueued, log.completed) == (3, 0)
    there.down, there.calls = False, 1
    assert not await log.catch_up(), "the reply to the second write is lost"
    assert (log.enqueued, log.completed) == (3, 1)
    lost = 0
    while not await log.catch_up():
        lost += 1
    assert lost == 1
    assert (log.enqueued, log.completed) == (3, 3)
    assert (await there.read("s")).tokens == (1, 2, 3, 4, 5)


async def test_a_fenced_log_has_nothing_left_to_write() -> None:
    memory, queue = MemoryBackend(), WriteBehindQueue()
    log = SessionLog(MemoryStore(memory, owner="me", ttl_s=60, lease_s=0), RECORD, write_behind=queue, grace_s=5)
    await log.create()
    await MemoryStore(memory, owner="other", ttl_s=60, lease_s=60).takeover("s")
    await log.append([3])
    assert await log.catch_up(), "the store answered"
    assert log.completed == log.enqueued == 1


async def test_waiting_for_what_is_enqueued_is_bounded() -> None:
    there, queue = store(), WriteBehindQueue()
    log = SessionLog(there, RECORD, write_behind=queue, grace_s=5)
    await log.create()
    there.down = True
    await log.append([3])
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(queue.run())
        with pytest.raises(Unavailable) as raised:
            await queue.written(0.05)
        await queue.written(0.05, "another session")
        loop.cancel()
    assert raised.value.reason == "STORE_UNAVAILABLE"
    assert there.attempts <= 2, "a store that is away is not asked again and again"


async def test_a_write_queued_while_another_one_is_written_keeps_its_own_age() -> None:
    there, now = Watched(MemoryBackend()), [100.0]
    queue = WriteBehindQueue(lambda: now[0])
    log = SessionLog(there, RECORD, write_behind=queue, grace_s=5)
    await log.create()

    async def come_late(*arguments: Any) -> None:
        if now[0] == 100.0:
            now[0] = 107.0
            await log.append([4])
        await MemoryStore.append(there, *arguments)

    there.append = come_late  # type: ignore[method-assign]
    await log.append([3])
    await queue._catch_up(log)
    now[0] = 108.0
    assert queue.lag_s == 1.0
