"""The embedded store holds so many bytes and no more: ended sessions go first, running ones never."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.store.memory import ENTRY_BYTES, MemoryBackend, MemoryStore
from gateway.store.session_store import SessionRecord
from slipstream.errors import NotFound, ResourceExhausted

SESSIONS = 8
TOKENS = 1000
SIZE = ENTRY_BYTES + 4 * TOKENS
"""Bytes of a record; one with a tenant's letter has 3 less."""


def record(name: str, tenant: str = "") -> SessionRecord:
    return SessionRecord(name, 1, tenant.encode(), 1, (7,) * (TOKENS - len(tenant)))


class Store(MemoryStore):
    """Room for SESSIONS records of TOKENS tokens."""

    def __init__(self) -> None:
        self.memory = MemoryBackend(lambda: 0.0, SESSIONS * SIZE, lambda params: params.decode()[:1])
        super().__init__(self.memory, owner="a", ttl_s=60.0, lease_s=60.0)

    @property
    def held(self) -> int:
        return sum(entry.size for entry in self.memory.entries.values())


async def test_ended_sessions_make_room_oldest_first_before_suspended_ones() -> None:
    store = Store()
    for number in range(SESSIONS - 2):
        await store.create(record(str(number)))
    for number in (3, 0, 1):
        await store.release(str(number), 1)
    await store.finish("4", 1, b"e" * 10)
    for number in range(100):
        await store.create(record(f"new {number}"))
        await store.finish(f"new {number}", 1, b"e")
        assert store.held <= SESSIONS * SIZE
    assert {"0", "1", "2", "3", "5"} <= store.memory.entries.keys()  # suspended or running: ended ones are enough
    with pytest.raises(NotFound):
        await store.read("4")


async def test_a_store_that_is_full_of_running_sessions_refuses_what_is_more_and_keeps_them() -> None:
    store = Store()
    for number in range(SESSIONS):
        await store.create(record(str(number)))
    for refused in (
        store.create(record("more")),
        store.append("3", 1, TOKENS, [1]),
        store.truncate("3", 2, TOKENS, b"", [1]),
        store.restore(SessionRecord("3", 1, b"", 1, (7,) * TOKENS + (8,))),
    ):
        with pytest.raises(ResourceExhausted) as full:
            await refused
        assert full.value.reason == "STORE_FULL" and full.value.retry_s
    assert store.held == SESSIONS * SIZE and len(store.memory.entries) == SESSIONS
    await store.release("5", 1)  # suspended, and nothing has ended
    await store.append("3", 1, TOKENS, [1])
    assert "5" not in store.memory.entries and len(store.memory.entries) == SESSIONS - 1


async def test_expired_and_truncated_records_leave_their_room_to_others() -> None:
    now = [0.0]
    memory = MemoryBackend(lambda: now[0], 2 * SIZE)
    store = MemoryStore(memory, owner="a", ttl_s=60.0, lease_s=60.0)
    for name in ("a", "b"):
        await store.create(record(name))
    await store.truncate("a", 2, 1)
    await store.append("b", 1, TOKENS, [1] * (TOKENS - 1))
    with pytest.raises(ResourceExhausted):
        await store.append("b", 1, 2 * TOKENS - 1, [1])
    now[0] = 61.0
    for name in ("c", "d"):
        await store.create(record(name))


async def test_a_session_that_is_taken_up_again_is_not_dropped() -> None:
    store = Store()
    for number in range(SESSIONS):
        await store.create(record(str(number)))
        await store.finish(str(number), 1, b"")
    await store.takeover("0")
    await store.create(record("more"))
    assert "0" in store.memory.entries and "1" not in store.memory.entries


async def test_a_tenant_that_fills_the_store_drops_its_own_sessions_and_not_another_s() -> None:
    store = Store()
    for number, end in enumerate(("finish", "release", "release")):
        await store.create(record(f"b{number}", "b"))
        await (store.finish(f"b{number}", 1, b"e") if end == "finish" else store.release(f"b{number}", 1))
    for number in range(50):
        await store.create(record(f"a{number}", "a"))
        await (store.finish(f"a{number}", 1, b"e") if number % 2 else store.release(f"a{number}", 1))
    assert {"b0", "b1", "b2"} <= store.memory.entries.keys()
    assert len(store.memory.entries) >= SESSIONS - 1
    for number in range(SESSIONS - 1):  # the other one gets its half, and whichever of the hog's ended is dropped first
        await store.create(record(f"c{number}", "c"))
        await store.release(f"c{number}", 1)
    counts = Counter(name[0] for name in store.memory.entries)
    assert counts["b"] >= 2 and counts["a"] >= 2 and counts["c"] >= 2


async def test_a_tenant_whose_sessions_all_run_is_refused_rather_than_another_s_dropped() -> None:
    store = Store()
    await store.create(record("b", "b"))
    await store.release("b", 1)
    for number in range(SESSIONS - 1):
        await store.create(record(f"a{number}", "a"))
    for refused in (store.create(record("more", "a")), store.append("a3", 1, TOKENS - 1, [1] * 20)):
        with pytest.raises(ResourceExhausted):
            await refused
    assert "b" in store.memory.entries
    await store.finish("a0", 1, b"")
    await store.create(record("b2", "b"))  # of the tenant that holds the most
    assert "a0" not in store.memory.entries and "b" in store.memory.entries
