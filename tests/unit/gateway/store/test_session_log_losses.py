"""A store that forgets its last writes, as a failover does: what its owner says next puts everything back.

Asynchronous replication may lose any number of the last writes, epochs included, or all of them.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_log import SessionLog
from gateway.store.session_store import SessionRecord
from gateway.store.write_behind import WriteBehindQueue
from slipstream.errors import Aborted

RECORD = SessionRecord(id="s", epoch=1, params=b"p", prompt_length=2, tokens=(1, 2))


class Forgetful(MemoryBackend):
    """Remembers what it held after each write, so that it can go back."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.past: list[Any] = [None]

    def remember(self) -> None:
        self.past.append(copy.deepcopy(self.entries.get("s")))

    def lose(self, writes: int) -> None:
        del self.past[max(1, len(self.past) - writes) :]
        self.entries.pop("s", None)
        if self.past[-1] is not None:
            self.entries["s"] = copy.deepcopy(self.past[-1])

    def store(self, owner: str) -> MemoryStore:
        return MemoryStore(self, owner=owner, ttl_s=60, lease_s=0)


@dataclass
class Owner:
    """A gateway's session, and what its client was shown."""

    log: SessionLog
    name: str
    tokens: list[int]
    params: bytes = b"p"
    alive: bool = True
    said: int = 0

    async def append(self) -> None:
        self.said += 1
        token = 1000 * ord(self.name) + self.said  # no two owners ever say the same
        self.tokens.append(token)
        await self.log.append([token])

    async def raise_epoch(self) -> None:
        await self.log.raise_epoch()

    async def renew(self) -> None:
        await self.log.renew()

    async def truncate(self) -> None:
        del self.tokens[2 + (len(self.tokens) - 2) // 2 :]
        await self.log.truncate(len(self.tokens))

    async def reseed(self) -> None:
        self.params += self.name.encode()
        await self.log.truncate(len(self.tokens), self.params)


@dataclass
class History:
    memory: Forgetful = field(default_factory=Forgetful)
    owners: dict[str, Owner] = field(default_factory=dict)
    lossless: bool = True

    async def run(self, steps: list[tuple[str, Any]]) -> None:
        log = SessionLog(self.memory.store("a"), RECORD, write_behind=None, grace_s=1)
        self.owners["a"] = Owner(log, "a", [*RECORD.tokens])
        await log.create()
        self.memory.remember()
        for name, argument in steps:
            await self.step(name, argument)
        for owner in self.owners.values():
            await self.speak(owner, "append")

    async def step(self, name: str, argument: Any) -> None:
        if name == "lose":
            self.memory.lose(argument)
            self.lossless = False
        elif name == "takeover":
            await self.take_over(argument)
        elif argument in self.owners:
            await self.speak(self.owners[argument], name)

    async def take_over(self, name: str) -> None:
        if "s" not in self.memory.entries:
            return
        store = self.memory.store(name)
        taken = await store.takeover("s")
        self.memory.remember()
        log = SessionLog(store, taken, write_behind=None, grace_s=1)
        said = self.owners[name].said if name in self.owners else 0
        if self.lossless:
            for former in self.owners.values():
                former.alive = former.alive and await self.fenced(former)
        self.owners[name] = Owner(log, name, [*taken.tokens], taken.params, said=said)

    async def fenced(self, former: Owner) -> bool:
        """False, once a store that lost nothing refused its former owner."""
        with pytest.raises(Aborted):
            await former.log.append([0])
        return False

    async def speak(self, owner: Owner, name: str) -> None:
        if not owner.alive:
            return
        try:
            await getattr(owner, name)()
        except Aborted:
            owner.alive = False
            return
        self.memory.remember()
        read = await self.memory.store("reader").read("s")
        assert (read.owner, read.epoch, list(read.tokens), read.params) == (
            owner.name,
            owner.log.epoch,
            owner.tokens,
            owner.params,
        )


WRITES = ["append", "append", "append", "raise_epoch", "renew", "truncate", "reseed"]
STEPS = st.one_of(
    st.tuples(st.sampled_from(WRITES), st.sampled_from("ab")),
    st.tuples(st.sampled_from(WRITES), st.sampled_from("ab")),
    st.tuples(st.just("takeover"), st.sampled_from("ab")),
    st.tuples(st.just("lose"), st.sampled_from([1, 1, 1, 2, 3, 99])),
)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, min_size=10, max_size=30))
def test_after_every_write_the_record_equals_the_state_of_its_writer_whatever_was_lost(
    steps: list[tuple[str, Any]],
) -> None:
    asyncio.run(History().run(steps))


async def test_a_former_owner_cannot_raise_the_epoch_of_the_one_that_came_after_a_loss() -> None:
    history = History()
    await history.run([("raise_epoch", "a"), ("lose", 1), ("takeover", "b"), ("raise_epoch", "a")])
    assert [owner.alive for owner in history.owners.values()] == [False, True]


@pytest.mark.parametrize("lost", range(1, 9))
@pytest.mark.parametrize("relaxed", [False, True])
async def test_the_end_of_a_session_puts_back_what_was_lost_before_it(relaxed: bool, lost: int) -> None:
    memory, write_behind = Forgetful(), WriteBehindQueue() if relaxed else None
    log = SessionLog(memory.store("a"), RECORD, write_behind=write_behind, grace_s=1)

    async def written() -> None:
        assert await log.catch_up()
        memory.remember()

    await log.create()
    memory.remember()
    for write in (
        lambda: log.append([3, 4]),
        lambda: log.append([5]),
        log.raise_epoch,
        lambda: log.append([6]),
        lambda: log.truncate(4, b"q"),
        lambda: log.append([7]),
    ):
        await write()
        await written()
    memory.lose(lost)
    await log.append([8])
    await written()
    memory.lose(lost)
    await log.finish(b"done")
    await written()
    read = await memory.store("reader").read("s")
    assert (read.tokens, read.params, read.epoch) == ((1, 2, 3, 4, 7, 8), b"q", 3)
    assert (read.outcome, read.leased) == (b"done", False)


async def test_queued_writes_restore_a_lost_record_and_follow_it() -> None:
    memory, write_behind = Forgetful(), WriteBehindQueue()
    log = SessionLog(memory.store("a"), RECORD, write_behind=write_behind, grace_s=1)
    await log.create()
    await log.append([3, 4])
    assert await log.catch_up()
    memory.entries.clear()
    for write in (log.append([5]), log.raise_epoch(), log.truncate(3), log.append([6]), log.finish(b"done")):
        await write
    assert await log.catch_up()
    read = await memory.store("reader").read("s")
    assert (read.tokens, read.epoch, read.outcome) == ((1, 2, 3, 6), 3, b"done")


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_log_that_is_lost_again_while_it_is_put_back_is_put_back_again(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    memory, restored = Forgetful(), list[int]()
    store = memory.store("a")
    log = SessionLog(store, RECORD, write_behind=None, grace_s=5)
    await log.create()
    await log.append([3])
    restore = store.restore

    async def lose_at_once(record: SessionRecord) -> None:
        await restore(record)
        restored.append(len(record.tokens))
        if len(restored) <= lost:
            memory.entries.clear()

    monkeypatch.setattr(store, "restore", lose_at_once)
    monkeypatch.setattr("gateway.store.session_log.RETRY_S", 0.001)
    memory.entries.clear()
    await log.append([4])
    assert (await store.read("s")).tokens == (1, 2, 3, 4)
    assert restored == [3] * (lost + 1)


async def test_an_owner_whose_next_epoch_was_interrupted_does_not_overrule_a_later_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Forgetful()
    old, store = memory.store("old"), memory.store("new")
    log = SessionLog(old, RECORD, write_behind=None, grace_s=5)
    await log.create()
    await log.append([3])
    memory.remember()
    await log.raise_epoch()
    memory.lose(0)  # the raised epoch is lost in a failover, and the next owner raises it again
    taken = await store.takeover("s", force=True)
    assert taken.epoch == log.epoch
    await store.append("s", taken.epoch, 3, [4, 5])

    async def interrupted(*_: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(old, "truncate", interrupted)
    with pytest.raises(asyncio.CancelledError):
        await log.raise_epoch()
    with pytest.raises(Aborted):
        await log.release()
    read = await store.read("s")
    assert (read.tokens, read.owner) == ((1, 2, 3, 4, 5), "new")
