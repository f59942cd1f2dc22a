"""Sessions outlive streams, clients and gateways: resumed, followed, rolled back, branched."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway.store.memory import Memory, MemoryStore
from gateway.tenant import Limits, Tenant
from slipstream.client import channel, error_of
from slipstream.completion import complete
from slipstream.errors import Aborted, InvalidArgument, NotFound, OutOfRange, Unavailable
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.front import TEXT, Answer, Front, Setting

LENGTH = verifier_pb2.FINISH_REASON_LENGTH


def store(memory: Memory, owner: str, lease_s: float = 60.0) -> MemoryStore:
    return MemoryStore(memory, owner=owner, ttl_s=60, lease_s=lease_s)


async def begun(front: Front, tokens: int = 9, **request: Any) -> tuple[Any, Answer]:
    """A call of which so many tokens have come."""
    call, answer = front.call(**request), Answer()
    while len(answer.tokens) < tokens:
        answer.add(await call.read())
    return call, answer


async def broken_off(call: Any, answer: Answer) -> Exception:
    """What the rest of the call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        await read_on(call, answer)
    return error_of(caught.value)


async def read_on(call: Any, answer: Answer) -> None:
    while (event := await call.read()) is not grpc.aio.EOF:
        answer.add(event)


async def left_after(front: Front, tokens: int = 9, **request: Any) -> Answer:
    """What a client had when it hung up, once the gateway has let the session go."""
    call, answer = await begun(front, tokens, **request)
    call.cancel()
    async with asyncio.timeout(5):
        while (await front.store.read(answer.started.session_id)).leased:
            await asyncio.sleep(0.01)
    return answer


async def test_a_client_that_comes_back_hears_exactly_what_is_missing(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    answer = await left_after(front)
    front.verifiers[0].limit = None
    await front.resume(answer.started.session_id, answer)
    assert answer.tokens == front.verifiers[0].script[:40]
    assert answer.text == front.tokenizer.decode(answer.tokens)
    assert answer.finished.reason == LENGTH
    first, second = front.verifiers[0].opens()
    assert (second.key.id, second.key.epoch) == (first.key.id, 2)
    assert list(second.prefix.token_ids[second.prefix.prompt_length :]) == answer.tokens[:9]


@pytest.mark.parametrize("have", [0, 1, 7, 40])
async def test_a_session_that_ended_is_told_again_from_anywhere(setting: Setting, have: int) -> None:
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    again = Answer(tokens=whole.tokens[:have])
    await front.resume(whole.started.session_id, again, characters=0)
    assert (again.tokens, again.text, again.finished) == (whole.tokens, whole.text, whole.finished)
    with pytest.raises(OutOfRange):
        await front.resume(whole.started.session_id, Answer(tokens=[0] * 41))


async def test_the_text_ends_before_a_stop_string_when_it_is_told_again(setting: Setting) -> None:
    front = await setting.front(setting.verifier(per_round=17))
    whole = await front.generate(stop=["lief 🚀"], max_tokens=60)
    again = await front.resume(whole.started.session_id)
    assert again.text == whole.text == TEXT[: TEXT.index("lief 🚀")]
    assert again.finished.stop == "lief 🚀"


async def test_several_clients_follow_one_session(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    call, first = await begun(front)
    others = [asyncio.create_task(front.resume(first.started.session_id)) for _ in range(3)]
    await asyncio.sleep(0.05)
    call.cancel()  # the others keep the session
    front.verifiers[0].limit = None
    for other in others:
        assert (await other).tokens == front.verifiers[0].script[:40]
    assert len(front.verifiers[0].opens()) == 1


async def test_another_gateway_follows_a_session_whose_owner_lives(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    call, first = await begun(front)
    follower = asyncio.create_task(beside.resume(first.started.session_id))
    await asyncio.sleep(0.3)
    front.verifiers[0].limit = None
    await read_on(call, first)
    answer = await follower
    assert (answer.tokens, answer.text, answer.finished) == (first.tokens, first.text, first.finished)
    assert len(front.verifiers[0].opens()) == 1


async def test_another_gateway_goes_on_with_a_session_whose_owner_is_dead(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "b", lease_s=0.5))
    answer = await left_after(front)
    taken = await store(memory, "dead", lease_s=0.5).takeover(answer.started.session_id)  # and never heard of again
    front.verifiers[0].limit = None
    asked = asyncio.get_running_loop().time()
    await front.resume(answer.started.session_id, answer)
    assert asyncio.get_running_loop().time() - asked >= 0.3
    assert answer.tokens == front.verifiers[0].script[:40]
    assert front.verifiers[0].opens()[-1].key.epoch == taken.epoch + 1


async def test_a_follower_of_a_session_goes_on_when_its_owner_lets_it_go(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    call, answer = await begun(front)
    follower = asyncio.create_task(beside.resume(answer.started.session_id))
    await asyncio.sleep(0.3)
    call.cancel()
    front.verifiers[0].limit = None
    assert (await follower).tokens == front.verifiers[0].script[:40]
    assert [opened.key.epoch for opened in front.verifiers[0].opens()] == [1, 2]


async def test_what_a_store_lost_is_written_again(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    call, answer = await begun(front)
    follower = asyncio.create_task(beside.resume(answer.started.session_id))
    await asyncio.sleep(0.3)
    entry = memory.entries[answer.started.session_id]
    del entry.tokens[-4 * 5 :]
    entry.owner, entry.lease_until = "somebody", 0.0
    front.verifiers[0].limit = None
    assert (await follower).tokens == front.verifiers[0].script[:40]
    assert list((await beside.record(answer.started.session_id)).output_token_ids) == front.verifiers[0].script[:40]
    call.cancel()


async def test_a_completion_goes_on_by_itself_on_another_gateway(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    said: list[str] = []
    request = gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=40)
    async with channel(front.gateway.address) as one, channel(beside.gateway.address) as other:
        running = asyncio.create_task(complete(one, request, said.append, [other]))
        while not said:
            await asyncio.sleep(0.01)
        front.verifiers[0].limit = None
        await front.gateway.server.stop(0)
        completion = await running
    assert completion.token_ids == front.verifiers[0].script[:40]
    assert "".join(said) == completion.text == front.tokenizer.decode(completion.token_ids)


async def test_a_gateway_that_ends_tells_its_clients_to_go_elsewhere(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    call, answer = await begun(front)
    ended = asyncio.create_task(broken_off(call, answer))
    await front.gateway.sessions.close()
    error = await ended
    assert isinstance(error, Unavailable) and error.reason == "SUSPENDED"
    assert not (await front.store.read(answer.started.session_id)).leased


async def test_a_request_that_never_began_is_not_resumed() -> None:
    async with channel("127.0.0.1:1") as line:
        with pytest.raises(Unavailable, match="no gateway answered"):
            await complete(line, gateway_pb2.GenerateRequest(prompt="x"))


async def test_a_session_rolled_back_says_another_thing_from_there(setting: Setting) -> None:
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
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    for gateway in (front, beside):
        call, answer = await begun(front)
        await gateway.roll_back(answer.started.session_id, 4)
        front.verifiers[0].limit = None
        assert isinstance(await broken_off(call, answer), Aborted)
        resumed = await gateway.resume(answer.started.session_id, Answer(tokens=answer.tokens[:4]))
        assert resumed.tokens == front.verifiers[0].script[:40]
        front.verifiers[0].limit = 9


async def test_followers_elsewhere_hear_of_a_rollback(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    call, answer = await begun(front)
    follower = asyncio.create_task(beside.resume(answer.started.session_id))
    await asyncio.sleep(0.3)
    await front.roll_back(answer.started.session_id, 4)
    with pytest.raises(Aborted) as caught:
        await follower
    assert caught.value.reason == "ROLLED_BACK"
    record = await front.store.read(answer.started.session_id)
    assert (len(record.tokens) - record.prompt_length, record.leased) == (4, False)
    call.cancel()


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


async def test_unknown_sessions_are_not_found(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    for name in ("", "nobody", "x" * 1000):
        with pytest.raises(NotFound):
            await front.resume(name)
        with pytest.raises(NotFound):
            await front.roll_back(name, 0)


async def test_a_session_is_cancelled_from_another_gateway(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    call, answer = await begun(front)
    await beside.stub.Cancel(gateway_pb2.CancelRequest(session_id=answer.started.session_id))
    front.verifiers[0].limit = None
    assert isinstance(await broken_off(call, answer), Aborted)
    record = await beside.record(answer.started.session_id)
    assert record.finish_reason == verifier_pb2.FINISH_REASON_CANCELLED
    assert list(record.output_token_ids) == answer.tokens


async def test_a_lease_is_kept_while_nothing_is_written(setting: Setting) -> None:
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a", lease_s=0.6), lease_s=0.6)
    call, answer = await begun(front)
    await asyncio.sleep(1.0)
    with pytest.raises(Aborted):
        await store(memory, "b").takeover(answer.started.session_id)
    call.cancel()


async def test_log_probabilities_come_with_what_is_said_anew(setting: Setting) -> None:
    def likely(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        for index in range(len(done.token_ids)):
            done.logprobs.add(logprob=-float(done.base_length + index))
        return [done]

    front = await setting.front(setting.verifier(limit=9, mangle=likely))
    answer = await left_after(front, logprobs=True)
    start = len(answer.started.prompt_token_ids)
    front.verifiers[0].limit = None
    again = await front.resume(answer.started.session_id)
    assert [one.logprob for one in answer.logprobs] == [-float(start + index) for index in range(9)]
    assert [one.logprob for one in again.logprobs] == [-float(start + index) for index in range(9, 40)]


@pytest.mark.parametrize("same", [True, False])
async def test_a_session_that_is_lost_is_said_again_and_heard_once(setting: Setting, same: bool) -> None:
    memory, other = Memory(), Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(other, "b"))  # that knows nothing of it
    said: list[str] = []
    request = gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=40)
    async with channel(front.gateway.address) as one, channel(beside.gateway.address) as two:
        running = asyncio.create_task(complete(one, request, said.append, [two]))
        while sum(map(len, said)) < 6:
            await asyncio.sleep(0.01)
        front.verifiers[0].limit = None
        if not same:
            front.verifiers[0].script = [5] * 60
        await front.gateway.sessions.close()
        await front.gateway.server.stop(0)
        if same:
            completion = await running
            assert completion.token_ids == front.verifiers[0].script[:40]
            assert "".join(said) == completion.text
        else:
            with pytest.raises(Aborted) as caught:
                await running
            assert caught.value.reason == "SESSION_LOST"
    first, *_, last = front.verifiers[0].opens()
    assert first.sampling.seed == last.sampling.seed


async def test_whatever_could_be_asked_for_can_be_resumed(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    others = [token for token in range(260) if token not in {*front.verifiers[0].script, setting.eos}][:64]
    answer = await left_after(front, stop_token_ids=others)
    front.verifiers[0].limit = None
    await front.resume(answer.started.session_id, answer)
    assert answer.tokens == front.verifiers[0].script[:40]
    first, second = front.verifiers[0].opens()
    assert list(first.stop_token_ids) == list(second.stop_token_ids) == [setting.eos, *others]


async def test_what_follows_a_rollback_is_not_what_a_follower_elsewhere_goes_on_with(setting: Setting) -> None:
    """Nothing was cut, but the seed is another one."""
    memory = Memory()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    call, answer = await begun(front)
    follower = asyncio.create_task(beside.resume(answer.started.session_id))
    await asyncio.sleep(0.3)
    await front.roll_back(answer.started.session_id, 9, seed=5)
    with pytest.raises(Aborted):
        await follower
    assert len(front.verifiers[0].opens()) == 1
    call.cancel()


async def test_a_client_that_has_more_text_than_tokens_hears_the_rest_of_it(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    again = Answer(text=whole.text[:20])
    await front.resume(whole.started.session_id, again, characters=20)
    assert (again.tokens, again.text) == (whole.tokens, whole.text)


async def test_an_idle_verifier_is_not_stuck_while_a_client_does_not_read(setting: Setting) -> None:
    front = await setting.front(setting.verifier(), credit_tokens=4, stall_s=0.2)
    call, answer = front.call(), Answer()
    answer.add(await call.read())
    front.verifiers[0].frozen = True
    await asyncio.sleep(0.7)
    front.verifiers[0].frozen = False
    await read_on(call, answer)
    assert answer.tokens == front.verifiers[0].script[:40]


async def test_what_was_paid_for_is_not_paid_for_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(tokens_per_minute=1000)
    tenant = Tenant("", limits, lambda: 0.0)
    monkeypatch.setattr("gateway.sessions.caller", lambda: tenant)
    front = await setting.front(setting.verifier(limit=9))
    answer = await left_after(front)
    used = 8 + 9
    assert left_of(tenant) == 1000 - used
    for _ in range(3):
        task = asyncio.create_task(front.resume(answer.started.session_id))
        await asyncio.sleep(0.1)
        task.cancel()
        async with asyncio.timeout(5):
            while tenant.sessions:
                await asyncio.sleep(0.01)
        assert left_of(tenant) == 1000 - used


def left_of(tenant: Tenant) -> int:
    """Tokens that it may still use this minute."""
    return next(tokens for tokens in range(1001, -1, -1) if not tenant._tokens.wait(tokens, 0.0) and tokens <= 1000)
