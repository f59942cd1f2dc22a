"""What a gateway does to sessions that it does not run leaves nothing half done behind."""

from __future__ import annotations

import asyncio

import pytest

from gateway.auth.tenant import OPEN, Tenant, TenantLimits
from gateway.sessions.ownership import SessionOwnership, request_of, stored_request
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_store import SessionRecord
from gateway.store.write_behind import WriteBehindQueue
from slipstream.errors import Aborted, NotFound, OutOfRange
from slipstream.v1 import gateway_pb2

BEFORE, AFTER = (gateway_pb2.GenerateRequest(model=name).SerializeToString() for name in "pq")
RECORD = SessionRecord(id="s", epoch=1, params=BEFORE, prompt_length=2, tokens=(1, 2))


def store(owner: str = "me") -> MemoryStore:
    return MemoryStore(MemoryBackend(), owner=owner, ttl_s=60, lease_s=60)


async def test_a_takeover_includes_writes_that_were_still_queued() -> None:
    write_behind = WriteBehindQueue()
    ownership = SessionOwnership(store(), write_behind, 5.0)
    log = ownership.open_log(RECORD)
    await log.create()
    await log.append([3])
    await log.release()
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(write_behind.run())
        taken = await ownership.take_over("s")
        writing.cancel()
    assert (taken.tokens, taken.epoch) == ((1, 2, 3), 2)


async def test_a_cut_that_is_refused_leaves_the_session_unchanged_and_unleased() -> None:
    there = store()
    await there.create(RECORD)
    with pytest.raises(OutOfRange):
        await SessionOwnership(there, None, 5.0).cut(RECORD, 3, (), AFTER)
    record = await there.read("s")
    assert (record.tokens, record.params, record.leased) == ((1, 2), BEFORE, False)


async def test_a_rollback_that_comes_late_does_not_repeat_itself() -> None:
    there = store()
    await there.create(RECORD)
    ownership = SessionOwnership(there, None, 5.0)
    await ownership.cut(RECORD, 2, (7,), AFTER)
    with pytest.raises(Aborted):
        await ownership.cut(RECORD, 2, (7,), AFTER)
    record = await there.read("s")
    assert (record.tokens, record.params, record.leased) == ((1, 2, 7), AFTER, False)


@pytest.mark.parametrize("owner", ["", "bob"])
def test_the_session_of_another_tenant_is_not_found(owner: str) -> None:
    asked, kept = gateway_pb2.GenerateRequest(model="m"), gateway_pb2.StoredRequest(owner=owner)
    record = SessionRecord("id", 1, asked.SerializeToString() + kept.SerializeToString(), 1, (1,))
    with pytest.raises(NotFound) as refusal:
        stored_request(record, Tenant("alice", TenantLimits()))
    assert refusal.value.reason == "NO_SESSION" and "never was" in refusal.value.message
    assert stored_request(record, Tenant(owner, TenantLimits()) if owner else OPEN).owner == owner
    assert request_of(record).model == "m"
