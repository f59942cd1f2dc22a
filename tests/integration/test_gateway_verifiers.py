"""Verifiers that die, come back, are full, stuck or wrong: sessions go on and no token changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc
import pytest

from gateway.auth.tenant import OPEN
from gateway.sessions.output_stream import Event
from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.errors import (
    GRAMMAR_TOO_COSTLY,
    STEP_FAILED,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from slipstream.rpc import multiplexed_stream
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.support.gateway_calls import begun, read_on
from tests.support.scripted_gateway import Answer, Setting
from tests.support.scripted_verifier import served


async def test_a_dead_verifiers_sessions_go_on_elsewhere_token_by_token_the_same(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9), setting.verifier(limit=9))
    answer = Answer()
    async for event in front.call():
        answer.add(event)
        if len(answer.tokens) == 9 and event.HasField("delta"):
            dead = next(index for index, verifier in enumerate(front.verifiers) if verifier.sessions)
            front.verifiers[1 - dead].limit = None
            await front.servers[dead].stop(0)
    assert answer.tokens == front.verifiers[0].script[:40]
    assert answer.finished.statistics.rehomed == 1
    (opened,) = front.verifiers[1 - dead].opens()
    assert list(opened.prefix.token_ids[opened.prefix.prompt_length :]) == answer.tokens[:9]
    assert opened.key.epoch == 2
    assert (await front.record(answer.started.session_id)).key.epoch == 2


async def test_a_verifier_that_comes_back_gets_its_sessions_again(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    reborn = setting.verifier()
    answer = Answer()
    async with AsyncExitStack() as stack:
        async for event in front.call():
            answer.add(event)
            if len(answer.tokens) == 9 and event.HasField("delta"):
                await front.servers[0].stop(0)
                await stack.enter_async_context(served(reborn, front.addresses[0]))
    assert answer.tokens == reborn.script[:40]
    assert answer.finished.statistics.rehomed == 1


async def test_streams_that_break_in_the_middle_of_a_text_use_up_none_of_its_rehomings(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=4), rehomings=1)
    (verifier,), (script,) = front.gateway.router.verifiers, front.verifiers
    answer, breaks = Answer(), 0
    async for event in front.call():
        answer.add(event)
        if event.HasField("delta") and script.limit is not None and len(answer.tokens) >= script.limit:
            breaks += 1
            script.limit = script.limit + 4 if breaks < 5 else None
            verifier._link.drop()
    assert answer.tokens == script.script[:40]
    assert answer.finished.statistics.rehomed == breaks == 5


async def test_a_session_that_breaks_every_stream_before_its_first_round_ends(setting: Setting) -> None:
    front = await setting.front(setting.verifier(frozen=True), rehomings=2)
    (verifier,), (script,) = front.gateway.router.verifiers, front.verifiers
    call = asyncio.create_task(front.generate())
    for opens in (1, 2, 3):
        await script.until(lambda opens=opens: len(script.opens()) == opens)
        verifier._link.drop()
    with pytest.raises(Unavailable) as caught:
        await call
    assert caught.value.reason == "STREAM_LOST" and len(script.opens()) == 3


async def test_one_loss_is_divided_among_the_sessions_that_may_have_caused_it(setting: Setting) -> None:
    front = await setting.front(setting.verifier(frozen=True), rehomings=1)
    (verifier,), (script,) = front.gateway.router.verifiers, front.verifiers
    calls = [asyncio.create_task(front.generate()) for _ in range(4)]
    for opens in (4, 8, 12):
        await script.until(lambda opens=opens: len(script.opens()) == opens)
        verifier._link.drop()
    await script.until(lambda: len(script.opens()) == 16)
    script.frozen = False
    for answer in await asyncio.gather(*calls):
        assert answer.tokens == script.script[:40]


async def test_a_session_too_large_for_the_stream_ends_alone(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    front = await setting.front(setting.verifier(limit=9))
    (verifier,), (script,) = front.gateway.router.verifiers, front.verifiers
    neighbour = asyncio.create_task(front.generate())
    await script.until(lambda: bool(script.opens()))
    monkeypatch.setattr(multiplexed_stream, "MAX_ITEM_BYTES", 150)  # as if prompts were long, and were not checked
    for _ in range(3):
        with pytest.raises(InvalidArgument) as caught:
            await front.generate(prompt="x" * 160)
        assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert len(verifier._sessions) == 1, "only the neighbour's is left"
    script.limit = None
    answer = await neighbour
    assert answer.tokens == script.script[:40] and answer.finished.statistics.rehomed == 0


async def test_a_session_whose_last_token_came_needs_no_verifier_to_end(setting: Setting) -> None:
    stopping = setting.verifier([*setting.tokenizer.encode("end").ids, setting.eos], mute=True)
    for verifier, reason in (
        (setting.verifier(mute=True), verifier_pb2.FINISH_REASON_LENGTH),
        (stopping, verifier_pb2.FINISH_REASON_STOP),
    ):
        front = await setting.front(verifier)
        answer = Answer()
        async for event in front.call(max_tokens=9):
            answer.add(event)
            if len(answer.tokens) in (4, 9) and event.HasField("delta"):
                await front.servers[0].stop(0)
        assert (answer.finished.reason, answer.finished.statistics.rehomed) == (reason, 0)


async def test_without_a_verifier_a_session_fails_typed_after_a_bounded_wait(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9), rehoming_wait_s=0.2)
    answer = Answer()
    with pytest.raises(grpc.RpcError) as caught:
        async for event in front.call():
            answer.add(event)
            if len(answer.tokens) == 9 and event.HasField("delta"):
                await front.servers[0].stop(0)
    assert isinstance(error_of(caught.value), Unavailable)
    record = await front.record(answer.started.session_id)
    assert (record.finish_reason, list(record.output_token_ids)) == (0, answer.tokens)


async def test_failures_of_a_session_reach_its_client_with_their_own_code(setting: Setting) -> None:
    for failure in (Internal("numbers", reason="BROKEN_NUMBERS"), ResourceExhausted("no room", reason="KV")):
        front = await setting.front(setting.verifier(refuse=failure))
        with pytest.raises(type(failure)) as caught:
            await front.generate()
        assert caught.value.reason == failure.reason


async def test_a_session_whose_grammar_is_too_costly_does_not_go_to_another_verifier(setting: Setting) -> None:
    failure = FailedPrecondition("takes too long", reason=GRAMMAR_TOO_COSTLY)
    front = await setting.front(setting.verifier(refuse=failure), setting.verifier(refuse=failure))
    with pytest.raises(FailedPrecondition) as caught:
        await front.generate()
    assert caught.value.reason == GRAMMAR_TOO_COSTLY
    assert sum(len(each.opens()) for each in front.verifiers) == 1


async def test_a_full_verifier_is_passed_over_for_another(setting: Setting) -> None:
    full, free = setting.verifier(refuse=ResourceExhausted("no room")), setting.verifier()
    front = await setting.front(full, free)
    for _ in range(2):
        assert len((await front.generate()).tokens) == 40
    assert full.opens()


def repeated(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
    stale = verifier_pb2.Round()
    stale.CopyFrom(done)
    stale.epoch -= 1
    return [stale, done, done]


async def test_repeated_and_stale_rounds_change_nothing(setting: Setting) -> None:
    front = await setting.front(setting.verifier(mangle=repeated))
    assert (await front.generate()).tokens == front.verifiers[0].script[:40]


async def test_a_verifier_that_ends_a_text_before_its_end_costs_a_rehoming_and_no_token(setting: Setting) -> None:
    def forgetful(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        return [done] if done.epoch > 1 or done.base_length < 20 else []

    front = await setting.front(setting.verifier(mangle=forgetful))
    answer = await front.generate()
    assert answer.tokens == front.verifiers[0].script[:40]
    assert answer.finished.statistics.rehomed == 1


async def test_a_verifier_that_breaks_the_protocol_costs_a_rehoming_and_no_token(setting: Setting) -> None:
    def faulty(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        if done.epoch == 1:
            done.base_length += 1
        elif done.epoch == 2:
            done.token_ids[0] = 260
        return [done]

    front = await setting.front(setting.verifier(mangle=faulty))
    answer = await front.generate()
    assert answer.tokens == front.verifiers[0].script[:40]
    assert answer.finished.statistics.rehomed == 2


async def test_a_verifier_commits_no_more_than_its_credit_ahead(setting: Setting) -> None:
    class Waiting(MemoryStore):
        """A store that is slow, so that the session takes nothing meanwhile."""

        gate = asyncio.Event()

        async def append(self, *arguments: Any) -> None:
            await self.gate.wait()
            await super().append(*arguments)

    store = Waiting(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(per_round=4), store=store, credit_tokens=8)
    (verifier,) = front.verifiers
    call = asyncio.create_task(front.generate())
    await verifier.until(lambda: any(session.output >= 8 for session in verifier.sessions.values()))
    steps = verifier.steps
    await verifier.until(lambda: verifier.steps > steps + 5)
    assert [session.output for session in verifier.sessions.values()] == [8]
    store.gate.set()
    assert (await call).tokens == verifier.script[:40]


@pytest.mark.parametrize(("interval", "most"), [(0, 40), (12, 5), (40, 2)])
async def test_a_client_chooses_the_size_of_its_messages(setting: Setting, interval: int, most: int) -> None:
    """Also where the interval is longer than the verifier's credit."""
    front = await setting.front(setting.verifier(per_round=4), credit_tokens=8)
    sent = [event.delta async for event in front.call(stream_interval=interval) if event.HasField("delta")]
    sizes = [len(delta.token_ids) for delta in sent if delta.token_ids]
    assert [token for delta in sent for token in delta.token_ids] == front.verifiers[0].script[:40]
    assert len(sizes) <= most and min(sizes[1:-1], default=interval) >= interval


async def test_tokens_that_a_client_reads_while_its_session_waits_for_a_verifier_become_credit_again(
    setting: Setting,
) -> None:
    front = await setting.front(setting.verifier(limit=9), credit_tokens=16)
    sessions, reborn = front.gateway.sessions, setting.verifier()
    async with AsyncExitStack() as stack:
        stream = await sessions._start_session(
            gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=40), OPEN, None
        )
        events = await stack.enter_async_context(aclosing(stream.follow()))
        await anext(events)
        while len(stream.tokens) < 9:
            await asyncio.sleep(0.01)
        await front.servers[0].stop(0)
        while not front.gateway.metrics.waiting:
            await asyncio.sleep(0.01)
        assert stream.lag == 9
        answer = asyncio.create_task(read(events))
        while stream.lag:
            await asyncio.sleep(0.01)
        await stack.enter_async_context(served(reborn, front.addresses[0]))
        assert (await answer).tokens == reborn.script[:40]
    assert [opened.credit for opened in reborn.opens()] == [16]


async def read(events: AsyncGenerator[Event, None]) -> Answer:
    """All that follows."""
    answer = Answer()
    async for event in events:
        if isinstance(event, gateway_pb2.Delta):
            answer.tokens += event.token_ids
    return answer


async def test_a_session_that_is_cancelled_between_two_verifiers_is_opened_on_no_other(setting: Setting) -> None:
    class Waiting(MemoryStore):
        asked, gate = asyncio.Event(), asyncio.Event()

        async def truncate(self, *asked: Any) -> None:  # the next epoch
            self.asked.set()
            await self.gate.wait()
            await super().truncate(*asked)

    store = Waiting(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(limit=9), setting.verifier(limit=9), store=store)
    call, answer = await begun(front)
    dead = next(index for index, verifier in enumerate(front.verifiers) if verifier.sessions)
    front.verifiers[1 - dead].limit = None
    await front.servers[dead].stop(0)
    await store.asked.wait()
    session = front.gateway.sessions.running(answer.started.session_id, OPEN)
    assert session is not None
    session.cancel()
    store.gate.set()
    await read_on(call, answer)
    assert answer.finished.reason == verifier_pb2.FINISH_REASON_CANCELLED
    assert front.verifiers[1 - dead].opens() == []


async def test_a_verifier_with_another_vocabulary_is_never_used(setting: Setting) -> None:
    odd = setting.verifier()
    odd.model = types_pb2.ModelInfo(name="odd", vocabulary_fingerprint="f00d", vocabulary_size=260, max_length=200)
    front = await setting.front(odd, setting.verifier())
    with pytest.raises(NotFound):
        await front.generate(model="odd")
    assert len((await front.generate()).tokens) == 40
    assert odd.commands == []


async def test_a_verifier_whose_model_fails_is_tried_again_after_a_delay(setting: Setting) -> None:
    """Without them all tries are over before what is wrong could pass."""
    failing = setting.verifier(refuse=Unavailable("the model cannot run", reason=STEP_FAILED))
    front = await setting.front(failing)
    asyncio.get_running_loop().call_later(0.6, setattr, failing, "refuse", None)
    answer = await front.generate()
    assert answer.tokens == failing.script[:40]
    assert 2 <= len(failing.opens()) <= 4


async def test_a_session_leaves_a_verifier_whose_model_fails_for_another_at_once(setting: Setting) -> None:
    failing = setting.verifier(refuse=Unavailable("the model cannot run", reason=STEP_FAILED))
    front = await setting.front(failing, setting.verifier())
    answers = [await front.generate() for _ in range(4)]
    assert all(answer.tokens == failing.script[:40] for answer in answers)
    assert len(failing.opens()) == sum(answer.finished.statistics.rehomed for answer in answers) > 0


async def test_a_stuck_verifier_loses_its_sessions_to_another(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9), setting.verifier(limit=9), stall_s=0.3, rehomings=50)
    answer = Answer()
    async for event in front.call():
        answer.add(event)
        if len(answer.tokens) == 9 and event.HasField("delta"):
            stuck = next(index for index, verifier in enumerate(front.verifiers) if verifier.sessions)
            front.verifiers[stuck].frozen = True
            front.verifiers[1 - stuck].limit = None
    assert answer.tokens == front.verifiers[0].script[:40]
    assert answer.finished.statistics.rehomed >= 1  # a machine that is slow enough makes others look stuck too
