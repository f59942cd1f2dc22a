"""What is in the log when something is shown, and what happens when the store or the session is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.errors import (
    Unavailable,
)
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.support.gateway_calls import begun, read_on
from tests.support.scripted_gateway import TEXT, Answer, Setting


class Flaky(MemoryStore):
    """A store that goes away after its first appends."""

    down = False
    appended = 0

    async def append(self, *arguments: Any) -> None:
        if self.down:
            raise Unavailable("away", reason="STORE_UNAVAILABLE")
        await super().append(*arguments)
        self.appended += 1
        self.down = self.appended == 2


async def test_strict_sessions_show_nothing_that_is_not_in_the_log(setting: Setting) -> None:
    store = Flaky(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(), store=store, store_grace_s=0.3)
    answer = Answer()
    with pytest.raises(grpc.RpcError) as caught:
        async for event in front.call():
            answer.add(event)
    error = error_of(caught.value)
    assert isinstance(error, Unavailable) and error.reason == "STORE_UNAVAILABLE"
    assert list((await store.read(answer.started.session_id)).tokens[8:]) == answer.tokens
    counted = front.gateway.metrics.series["toy", ""].sums
    assert counted.emitted == len(answer.tokens) == 3 * counted.rounds  # nor is it counted


class Frozen(Flaky):
    """A store that goes away and never answers a release."""

    async def release(self, *arguments: Any) -> None:
        await asyncio.Event().wait()


async def test_a_client_gets_store_unavailable_before_its_record_is_released(setting: Setting) -> None:
    store = Frozen(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(), store=store, store_grace_s=0.3)
    async with asyncio.timeout(60):
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in front.call():
                pass
    assert error_of(caught.value).reason == "STORE_UNAVAILABLE"


async def test_relaxed_sessions_go_on_and_the_log_catches_up_in_order(setting: Setting) -> None:
    store = Flaky(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(), store=store, durability="relaxed")
    answer = await front.generate(stop=["lief"], max_tokens=60)
    assert answer.text == TEXT[: TEXT.index("lief")]
    store.down = False
    async with asyncio.timeout(60):
        while not (record := await front.record(answer.started.session_id)).finish_reason:
            await asyncio.sleep(0.01)
    assert len(record.output_token_ids) == answer.finished.output_tokens
    assert list(record.output_token_ids) == answer.tokens[: answer.finished.output_tokens]


async def test_a_session_taken_over_by_another_gateway_is_streamed_on_from_its_log(setting: Setting) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=MemoryStore(memory, owner="me", ttl_s=60, lease_s=0))
    other = MemoryStore(memory, owner="other", ttl_s=60, lease_s=60)
    call, answer = await begun(front, logprobs=False)
    taken = await other.takeover(answer.started.session_id)
    front.verifiers[0].limit = None
    await front.verifiers[0].until(lambda: not front.verifiers[0].sessions)
    rest = front.verifiers[0].script[9:20]
    await other.append(taken.id, taken.epoch, taken.length, rest)
    ended = gateway_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH, output_tokens=20)
    await other.finish(taken.id, taken.epoch, ended.SerializeToString())
    await read_on(call, answer)
    assert answer.tokens == front.verifiers[0].script[:20]
    assert answer.finished == ended
