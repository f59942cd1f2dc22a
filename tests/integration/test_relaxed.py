"""Relaxed sessions show first and log later: whoever rolls one back, cancels or resumes it finds all that was shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.errors import Aborted, Unavailable
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.support.fleet import until
from tests.support.gateway_calls import begun, broken_off, following, read_on
from tests.support.scripted_gateway import Answer, Front, Setting


class Late(MemoryStore):
    """Appends wait for the gate, and then fail while the store is `away`."""

    def __init__(self, memory: MemoryBackend, owner: str = "me") -> None:
        super().__init__(memory, owner=owner, ttl_s=60, lease_s=60)
        self.gate = asyncio.Event()
        self.away = False

    async def append(self, *arguments: Any) -> None:
        await self.gate.wait()
        if self.away:
            raise Unavailable("away", reason="STORE_UNAVAILABLE")
        await super().append(*arguments)


async def shown(setting: Setting, **config: Any) -> tuple[Front, Late, Any, Answer]:
    """A session of which 9 tokens were shown, and none is in the log."""
    store = Late(MemoryBackend())
    front = await setting.front(setting.verifier(limit=9), store=store, durability="relaxed", **config)
    call, answer = await begun(front)
    assert logged(store, answer) == []
    return front, store, call, answer


def logged(store: Late, answer: Answer) -> list[int]:
    entry = store._memory.entries[answer.started.session_id]
    return memoryview(entry.tokens).cast("I").tolist()[entry.prompt_length :]


async def left(front: Front, call: Any) -> None:
    """The client hung up, and the gateway let the session go."""
    call.cancel()
    async with asyncio.timeout(60):
        while front.gateway.sessions._entries:
            await asyncio.sleep(0.01)


async def cancel(front: Front, name: str) -> None:
    await front.stub.Cancel(gateway_pb2.CancelRequest(session_id=name))


async def roll_back(front: Front, name: str) -> None:
    await front.stub.Rollback(gateway_pb2.RollbackRequest(session_id=name, output_tokens=8))


async def branch(front: Front, name: str) -> None:
    await front.stub.Rollback(gateway_pb2.RollbackRequest(session_id=name, output_tokens=8, branch=True))


async def resume(front: Front, name: str) -> None:
    call, _ = await following(front, name)
    call.cancel()


Ask = Callable[[Front, str], Awaitable[None]]


@pytest.mark.parametrize(
    ("ask", "kept", "stays"),
    [
        *((ask, kept, stays) for ask, kept in ((cancel, 9), (roll_back, 8), (branch, 9)) for stays in (True, False)),
        (resume, 9, False),
    ],
)
async def test_tokens_shown_to_a_client_are_written_before_any_other_writer_changes_the_log(
    setting: Setting, ask: Ask, kept: int, stays: bool
) -> None:
    front, store, call, answer = await shown(setting)
    if not stays:
        await left(front, call)
    asking = asyncio.ensure_future(ask(front, answer.started.session_id))
    asyncio.get_running_loop().call_later(0.1, store.gate.set)
    await asking
    assert logged(store, answer) == answer.tokens[:kept]
    call.cancel()


@pytest.mark.parametrize("ask", [cancel, roll_back, resume])
async def test_an_unavailable_store_is_reported_in_bounded_time_and_nothing_is_lost(setting: Setting, ask: Ask) -> None:
    front, store, call, answer = await shown(setting, store_grace_s=0.3)
    await left(front, call)
    store.away = True
    store.gate.set()
    with pytest.raises(Exception) as caught:
        await asyncio.wait_for(ask(front, answer.started.session_id), 60.0)
    error = error_of(caught.value)  # type: ignore[arg-type]
    assert isinstance(error, Unavailable) and error.reason == "STORE_UNAVAILABLE"
    store.away = False
    await until(lambda: logged(store, answer) == answer.tokens)
    again = await following(front, answer.started.session_id)
    assert again[1].tokens == answer.tokens
    again[0].cancel()


async def test_a_rollback_of_a_running_session_waits_only_for_what_was_shown_before_it(setting: Setting) -> None:
    """A session that is always ahead of its log must not keep it waiting."""
    front, store, call, answer = await shown(setting, store_grace_s=20.0)
    reading = asyncio.create_task(broken_off(call, answer))
    front.verifiers[0].limit = None
    store.gate.set()
    await roll_back(front, answer.started.session_id)
    assert isinstance(await reading, Aborted) or answer.finished.reason
    assert logged(store, answer) == front.verifiers[0].script[:8]


async def test_a_session_cancelled_elsewhere_ends_as_its_log_stands(setting: Setting) -> None:
    front, store, call, answer = await shown(setting)
    beside = await setting.beside(front, MemoryStore(store._memory, owner="b", ttl_s=60, lease_s=60))
    await cancel(beside, answer.started.session_id)
    store.gate.set()
    await read_on(call, answer)
    reason = verifier_pb2.FINISH_REASON_CANCELLED
    assert (answer.finished.reason, answer.finished.output_tokens) == (reason, 0)
