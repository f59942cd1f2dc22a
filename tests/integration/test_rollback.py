"""Sessions are rolled back, edited, branched and cancelled, wherever they run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.auth.tenant import OPEN
from gateway.store.memory import MemoryBackend
from slipstream.errors import Aborted, InvalidArgument, OutOfRange
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.support.gateway_calls import Shared, begun, broken_off, read_on, store
from tests.support.scripted_gateway import Answer, Setting

LENGTH = verifier_pb2.FINISH_REASON_LENGTH
EDIT = gateway_pb2.TokenIds(token_ids=[1, 2])


async def test_a_rolled_back_session_continues_with_the_edit_and_the_new_seed(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    name = whole.started.session_id
    rolled = await front.roll_back(name, 10, token_ids=gateway_pb2.TokenIds(token_ids=[1, 2]), seed=99)
    assert (rolled.key.id, rolled.key.epoch, rolled.output_tokens) == (name, 3, 10)
    assert (await front.record(name)).finish_reason == 0
    answer = await front.resume(name, Answer(tokens=whole.tokens[:10]))
    assert answer.tokens[:12] == [*whole.tokens[:10], 1, 2]
    assert answer.tokens[12:] == front.verifiers[0].script[12:40]
    opened = front.verifiers[0].opens()[-1]
    assert (opened.sampling.seed, opened.key.epoch) == (99, 4)
    assert (await front.record(name)).seed == 99


async def test_a_running_session_is_rolled_back_wherever_it_runs(setting: Setting) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    for gateway in (front, beside):
        call, answer = await begun(front)
        await gateway.roll_back(answer.started.session_id, 4)
        front.verifiers[0].limit = None
        error = await broken_off(call, answer)
        assert isinstance(error, Aborted) and error.reason == "ROLLED_BACK"
        resumed = await gateway.resume(answer.started.session_id, Answer(tokens=answer.tokens[:4]))
        assert resumed.tokens == front.verifiers[0].script[:40]
        front.verifiers[0].limit = 9


async def test_a_rollback_ends_the_streams_of_followers_on_other_gateways(shared: Shared) -> None:
    await shared.front.roll_back(shared.name, 4)
    error = await broken_off(shared.follower, shared.follower_answer)
    assert isinstance(error, Aborted) and error.reason == "ROLLED_BACK"
    record = await shared.front.store.read(shared.name)
    assert (len(record.tokens) - record.prompt_length, record.leased) == (4, False)
    shared.call.cancel()


async def test_a_branch_leaves_its_session_alone(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    branch = (await front.roll_back(whole.started.session_id, 5, branch=True, max_tokens=60)).key
    assert branch.id != whole.started.session_id and branch.epoch == 1
    answer = await front.resume(branch.id)
    assert answer.tokens == front.verifiers[0].script[:60]
    record = await front.record(whole.started.session_id)
    assert (list(record.output_token_ids), record.key.epoch, record.finish_reason) == (whole.tokens, 1, LENGTH)


@pytest.mark.parametrize(
    ("error", "keep", "change"),
    [
        (OutOfRange, 41, {}),
        (InvalidArgument, 20, {"max_tokens": 10}),
        (InvalidArgument, 20, {"token_ids": gateway_pb2.TokenIds(token_ids=[9999])}),
        (InvalidArgument, 30, {"token_ids": gateway_pb2.TokenIds(token_ids=[1] * 11)}),
        (InvalidArgument, 30, {"text": "much more than ten bytes"}),
    ],
)
async def test_a_rollback_that_cannot_be_changes_nothing(
    setting: Setting, error: type[Exception], keep: int, change: dict[str, Any]
) -> None:
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    before = await front.store.read(whole.started.session_id)
    with pytest.raises(error):
        await front.roll_back(whole.started.session_id, keep, **change)
    assert await front.store.read(whole.started.session_id) == before


async def test_a_session_is_cancelled_from_another_gateway(shared: Shared) -> None:
    await shared.beside.stub.Cancel(gateway_pb2.CancelRequest(session_id=shared.name))
    shared.go_on()
    for call, answer in ((shared.call, shared.answer), (shared.follower, shared.follower_answer)):
        await read_on(call, answer)
        told = answer.finished.reason, answer.finished.output_tokens, answer.tokens
        assert told == (verifier_pb2.FINISH_REASON_CANCELLED, 9, shared.text[:9])
    record = await shared.beside.record(shared.name)
    assert record.finish_reason == verifier_pb2.FINISH_REASON_CANCELLED
    assert list(record.output_token_ids) == shared.answer.tokens


async def test_a_cancelled_session_has_ended_even_if_its_client_leaves_meanwhile(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    call, answer = await begun(front)
    sessions, name = front.gateway.sessions, answer.started.session_id
    cancelling = asyncio.create_task(sessions.cancel(name, OPEN))
    await asyncio.sleep(0)
    sessions._entries[name].leave()  # as its last client does
    await cancelling
    assert (await front.record(name)).finish_reason == verifier_pb2.FINISH_REASON_CANCELLED
    call.cancel()


async def test_resuming_a_former_revision_does_not_return_the_rest_of_another_text(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    name, former = whole.started.session_id, Answer(tokens=whole.tokens[:20])
    await front.roll_back(name, 10, token_ids=EDIT)
    with pytest.raises(Aborted) as caught:
        await front.resume(name, former, revision=whole.started.revision)
    assert caught.value.reason == "ROLLED_BACK" and not front.gateway.sessions._entries
    again = await front.resume(name, Answer(tokens=whole.tokens[:10]), revision=1)
    assert again.started.revision == 1 and again.tokens[10:12] == [1, 2]


@pytest.mark.parametrize(
    ("keep", "change", "left"), [(9, {"seed": 5}, 9), (9, {"token_ids": EDIT}, 9), (4, {"token_ids": EDIT}, 4)]
)
async def test_followers_receive_how_many_of_their_tokens_a_rollback_left(
    shared: Shared, keep: int, change: dict[str, Any], left: int
) -> None:
    """Even where the log is as it was, or as long again."""
    await shared.beside.roll_back(shared.name, keep, **change)
    shared.go_on()
    again = await shared.beside.resume(shared.name, Answer(tokens=shared.text[:keep]))
    assert len(again.tokens) == 40
    for call, answer in ((shared.call, shared.answer), (shared.follower, shared.follower_answer)):
        error = await broken_off(call, answer)
        assert isinstance(error, Aborted) and error.reason == "ROLLED_BACK"
        assert f"to {left} output tokens" in error.message


@pytest.mark.parametrize("told", [True, False])
async def test_a_gateway_that_missed_a_rollback_does_not_continue_the_former_text(shared: Shared, told: bool) -> None:
    rolled = await shared.beside.roll_back(shared.name, 4, token_ids=EDIT)
    more = {"revision": rolled.revision} if told else {}
    call = shared.front.stub.Resume(gateway_pb2.ResumeRequest(session_id=shared.name, offset=4, **more))
    again = Answer(tokens=shared.text[:4])
    while len(again.tokens) < 6:
        again.add(await call.read())
    assert again.tokens[4:] == [1, 2]
    shared.go_on()
    await read_on(call, again)
    assert len(again.tokens) == 40
    error = await broken_off(shared.call, shared.answer)
    assert isinstance(error, Aborted) and "to 4 output tokens" in error.message
