"""Sessions outlive streams, clients and gateways: resumed and followed."""

from __future__ import annotations

import asyncio

import pytest

from gateway.auth.tenant import OPEN, Tenant, TenantLimits
from gateway.gateway import drain
from gateway.request_context import RequestContext
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_store import SessionRecord
from slipstream.client.client import RetrySettings, complete
from slipstream.client.completion import Completion
from slipstream.errors import SERVING_ENDED, Aborted, NotFound, OutOfRange, Unavailable
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.support.fleet import until
from tests.support.gateway_calls import Shared, begun, broken_off, following, left_after, read_on, store
from tests.support.resumed_completion import resume
from tests.support.scripted_gateway import TEXT, Answer, Setting

LENGTH = verifier_pb2.FINISH_REASON_LENGTH


async def test_a_client_that_resumes_receives_exactly_what_it_lacks(setting: Setting) -> None:
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
async def test_an_ended_session_is_streamed_again_from_any_offset(setting: Setting, have: int) -> None:
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    again = Answer(tokens=whole.tokens[:have])
    await front.resume(whole.started.session_id, again, characters=0)
    assert (again.tokens, again.text, again.finished) == (whole.tokens, whole.text, whole.finished)
    with pytest.raises(OutOfRange):
        await front.resume(whole.started.session_id, Answer(tokens=[0] * 41))


async def test_characters_beyond_the_text_are_refused(setting: Setting) -> None:
    """As of a client that counts bytes: it would be told that it has all of a text whose end it lacks."""
    front = await setting.front(setting.verifier())
    whole = await front.generate()
    assert len(whole.text.encode()) > len(whole.text)
    had = Answer(tokens=list(whole.tokens))
    await front.resume(whole.started.session_id, had, characters=len(whole.text))
    with pytest.raises(OutOfRange) as refused:
        await front.resume(whole.started.session_id, had, characters=len(whole.text.encode()))
    assert refused.value.reason == "NO_OFFSET"


async def test_a_resumed_text_ends_before_its_stop_string(setting: Setting) -> None:
    front = await setting.front(setting.verifier(per_round=17))
    whole = await front.generate(stop=["lief 🚀"], max_tokens=60)
    again = await front.resume(whole.started.session_id)
    assert again.text == whole.text == TEXT[: TEXT.index("lief 🚀")]
    assert again.finished.stop == "lief 🚀"


async def test_several_clients_follow_one_session(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    call, first = await begun(front)
    others = [await following(front, first.started.session_id) for _ in range(3)]
    call.cancel()  # the others keep the session
    front.verifiers[0].limit = None
    for other, answer in others:
        await read_on(other, answer)
        assert answer.tokens == front.verifiers[0].script[:40]
    assert len(front.verifiers[0].opens()) == 1


async def test_another_gateway_follows_a_session_whose_owner_lives(shared: Shared) -> None:
    shared.go_on()
    await read_on(shared.call, shared.answer)
    await read_on(shared.follower, shared.follower_answer)
    assert shared.follower_answer == shared.answer
    assert len(shared.front.verifiers[0].opens()) == 1


async def test_another_gateway_goes_on_with_a_session_whose_owner_is_dead(setting: Setting) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "b", lease_s=0.5))
    answer = await left_after(front)
    taken = await store(memory, "dead", lease_s=0.5).takeover(answer.started.session_id)  # and never heard of again
    front.verifiers[0].limit = None
    asked = asyncio.get_running_loop().time()
    await front.resume(answer.started.session_id, answer)
    assert asyncio.get_running_loop().time() - asked >= 0.3
    assert answer.tokens == front.verifiers[0].script[:40]
    assert front.verifiers[0].opens()[-1].key.epoch == taken.epoch + 1


async def test_a_follower_of_a_session_goes_on_when_its_owner_releases_it(shared: Shared) -> None:
    shared.call.cancel()
    shared.go_on()
    await read_on(shared.follower, shared.follower_answer)
    assert shared.follower_answer.tokens == shared.text
    assert [opened.key.epoch for opened in shared.front.verifiers[0].opens()] == [1, 2]


@pytest.mark.parametrize("takeovers", [0, 2])
async def test_tokens_that_a_store_lost_are_written_again(shared: Shared, takeovers: int) -> None:
    entry = shared.memory.entries[shared.name]
    del entry.tokens[-4 * 5 :]
    entry.epoch += takeovers
    entry.owner, entry.lease_until = "somebody", 0.0
    shared.go_on()
    await read_on(shared.follower, shared.follower_answer)
    assert shared.follower_answer.tokens == shared.text
    assert list((await shared.beside.record(shared.name)).output_token_ids) == shared.text
    shared.call.cancel()


async def test_a_completion_goes_on_by_itself_on_another_gateway(setting: Setting) -> None:
    memory = MemoryBackend()
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


@pytest.mark.parametrize("dead_first", [False, True])
async def test_a_session_is_resumed_on_the_first_gateway_that_can(setting: Setting, dead_first: bool) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    answer = await left_after(front)
    front.verifiers[0].limit = None
    if dead_first:
        await beside.gateway.server.stop(0)
    completion = Completion(started=answer.started)
    async with channel(beside.gateway.address) as one, channel(front.gateway.address) as other:
        await resume([one, other], completion, retry=RetrySettings(resume_s=0.0))
    assert completion.token_ids == front.verifiers[0].script[:40]
    assert (await front.store.read(answer.started.session_id)).owner == ("a" if dead_first else "b")


async def test_the_rest_of_a_text_is_streamed_once_however_often_the_connection_breaks(setting: Setting) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    answer = await left_after(front)
    completion = Completion(started=answer.started, begins=3, token_ids=[0] * 3)
    async with channel(front.gateway.address) as one, channel(beside.gateway.address) as other:
        running = asyncio.create_task(resume([one, other], completion))
        while not completion.text:
            await asyncio.sleep(0.01)
        front.verifiers[0].limit = None
        await front.gateway.server.stop(0)
        await running
    assert completion.report()["token_ids"] == front.verifiers[0].script[3:40]
    assert completion.text == front.tokenizer.decode(front.verifiers[0].script[3:40])


class Waiting(MemoryStore):
    """The first read after `hold` takes until `gate`."""

    held: asyncio.Event | None = None
    gate: asyncio.Event

    def hold(self) -> asyncio.Event:
        self.held, self.gate = asyncio.Event(), asyncio.Event()
        return self.held

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        if held := self.held:
            self.held = None
            held.set()
            await self.gate.wait()
        return await super().read(session, start)


@pytest.mark.parametrize("runs", [True, False])
async def test_a_resume_during_the_release_of_a_session_takes_it_up_again(setting: Setting, runs: bool) -> None:
    waiting = Waiting(MemoryBackend(), owner="a", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(limit=9), store=waiting)
    sessions = front.gateway.sessions
    call, answer = await begun(front) if runs else (None, await left_after(front))
    name, held = answer.started.session_id, waiting.hold()
    resuming = asyncio.create_task(sessions._open_stream(name, OPEN))
    await held.wait()
    if not runs:
        await sessions._open_stream(name, OPEN)  # came later, is there first, and leaves
    sessions._entries[name].leave()
    waiting.gate.set()
    front.verifiers[0].limit = None
    stream = await resuming
    said = [event async for event in stream.follow() if isinstance(event, gateway_pb2.Delta)]
    assert [token for delta in said for token in delta.token_ids] == front.verifiers[0].script[:40]
    if call is not None:
        call.cancel()


async def test_a_gateway_that_ends_asks_its_clients_to_resume_elsewhere(setting: Setting) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    call, answer = await begun(front)
    ended = asyncio.create_task(broken_off(call, answer))
    await front.gateway.sessions.close()
    error = await ended
    assert isinstance(error, Unavailable) and error.reason == "SUSPENDED"
    assert not (await front.store.read(answer.started.session_id)).leased


async def test_when_serving_ends_a_client_without_another_gateway_gets_its_error_at_once(setting: Setting) -> None:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"), alone=True)
    beside = await setting.beside(front, store(memory, "b"))
    request = gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=40)
    heard: list[list[str]] = [[], []]
    async with channel(front.gateway.address) as one, channel(beside.gateway.address) as other:
        alone = asyncio.create_task(complete(one, request, heard[0].append))
        goes_on = asyncio.create_task(complete(one, request, heard[1].append, [other]))
        await until(lambda: all(heard))
        front.verifiers[0].limit = None
        await front.gateway.sessions.close()
        with pytest.raises(Unavailable, match=r"^Serving ends here") as caught:
            await alone
        assert caught.value.reason == SERVING_ENDED
        assert (await goes_on).token_ids == front.verifiers[0].script[:40]


async def test_a_gateway_that_ends_without_a_verifier_waits_for_no_session(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    call, answer = await begun(front)
    await front.servers[0].stop(0)
    router = front.gateway.router
    while router.ready:
        await router.changes.wait()
    async with asyncio.timeout(60):
        await drain(front.gateway.server, front.gateway.sessions, grace_s=600)
    error = await broken_off(call, answer)
    assert isinstance(error, Unavailable) and error.reason == "SUSPENDED"


async def test_a_request_that_never_began_is_not_resumed() -> None:
    async with channel("127.0.0.1:1") as line:
        with pytest.raises(
            Unavailable, match=r"no gateway answered: nothing listens at [^.]+\.0\.0\.1:1; [^.]+\. Start"
        ):
            await complete(line, gateway_pb2.GenerateRequest(prompt="x"))


async def test_unknown_sessions_are_not_found(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    for name in ("", "nobody", "x" * 1000):
        with pytest.raises(NotFound):
            await front.resume(name)
        with pytest.raises(NotFound):
            await front.roll_back(name, 0)


async def test_a_lease_is_kept_while_nothing_is_written(setting: Setting) -> None:
    now = [0.0]
    memory = MemoryBackend(clock=lambda: now[0])
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a", lease_s=60), lease_s=0.06)
    call, answer = await begun(front)
    entry = memory.entries[answer.started.session_id]
    for _ in range(3):
        now[0] += 50.0
        await until(lambda: entry.lease_until == now[0] + 60.0)
    with pytest.raises(Aborted):
        await store(memory, "b").takeover(answer.started.session_id)
    call.cancel()


class Unreleased(MemoryStore):
    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        raise Unavailable("away", reason="STORE_UNAVAILABLE")


async def test_a_gateway_waits_for_no_lease_of_its_own(setting: Setting) -> None:
    front = await setting.front(
        setting.verifier(limit=9),
        store=Unreleased(MemoryBackend(), owner="a", ttl_s=600, lease_s=600),
        store_grace_s=0.1,
    )
    call, answer = await begun(front)
    call.cancel()
    while front.gateway.sessions._entries:
        await asyncio.sleep(0.01)
    front.verifiers[0].limit = None
    assert (await front.store.read(answer.started.session_id)).leased
    async with asyncio.timeout(60):
        await front.resume(answer.started.session_id, answer)
    assert answer.tokens == front.verifiers[0].script[:40]


class Stuck(MemoryStore):
    """Answers no renewal of one session."""

    session = ""
    others = 0

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        if session == self.session:
            await asyncio.Event().wait()
        self.others += 1
        await super().renew(session, epoch, length)


async def test_a_renewal_that_hangs_holds_up_no_other_lease(setting: Setting) -> None:
    stuck = Stuck(MemoryBackend(), owner="a", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(limit=9), store=stuck, lease_s=0.06)
    call, answer = await begun(front)
    other, _ = await begun(front)
    stuck.session, stuck.others = answer.started.session_id, 0
    async with asyncio.timeout(60):
        while stuck.others < 3:
            await asyncio.sleep(0.01)
    call.cancel()
    other.cancel()


async def test_a_resumed_stream_has_log_probabilities_of_new_tokens_alone(setting: Setting) -> None:
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
async def test_a_lost_session_is_generated_again_and_streamed_without_repeating_a_token(
    setting: Setting, same: bool
) -> None:
    memory, other = MemoryBackend(), MemoryBackend()
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


async def test_a_session_with_as_many_stop_tokens_as_allowed_can_be_resumed(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    others = [token for token in range(260) if token not in {*front.verifiers[0].script, setting.eos}][:64]
    answer = await left_after(front, stop_token_ids=others)
    front.verifiers[0].limit = None
    await front.resume(answer.started.session_id, answer)
    assert answer.tokens == front.verifiers[0].script[:40]
    first, second = front.verifiers[0].opens()
    assert list(first.stop_token_ids) == list(second.stop_token_ids) == [setting.eos, *others]


@pytest.mark.parametrize("served", [{}, {"vocabulary_fingerprint": "f00d"}, {"method": "ngram"}])
async def test_sessions_go_on_when_their_named_drafters_are_no_longer_served(
    setting: Setting, served: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.requests.speculation")
    memory, rejection = MemoryBackend(), gateway_pb2.SamplingOptions(acceptance=types_pb2.ACCEPTANCE_RULE_REJECTION)
    first = setting.verifier(limit=9)
    trusted = {"trusted_drafters": ("mine",)}
    drafter = await setting.drafter()
    front = await setting.front(first, store=store(memory, "a"), drafters=(f"mine={drafter}",), **trusted)
    others = {"drafters": (f"mine={await setting.drafter(**served)}",), **trusted} if served else {}
    beside = await setting.beside(front, store(memory, "b"), **others)
    while any(not known.present for known in beside.gateway.router.drafters):
        await beside.gateway.router.changes.wait()
    named = gateway_pb2.SpeculationOptions(drafters=["mine"])
    answer = await left_after(front, speculation=named, sampling=rejection)
    first.limit = None
    name = answer.started.session_id
    await beside.resume(name, answer)
    assert answer.tokens == first.script[:40]
    assert "without the drafters" in caplog.text
    await beside.roll_back(name, 5)
    await front.resume(name)
    drafters = [[drafter.name for drafter in opened.drafters] for opened in first.opens()]
    assert drafters == [["mine"], [], ["mine"]]  # a gateway that serves it gives it again


async def test_a_client_with_more_text_than_tokens_receives_the_rest_of_both(setting: Setting) -> None:
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


async def test_tokens_that_were_charged_are_not_charged_again_on_resume(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TenantLimits(tokens_per_minute=1000)
    tenant = Tenant("", limits, lambda: 0.0)
    monkeypatch.setattr("gateway.api.grpc_service.as_request_context", lambda _: RequestContext(tenant=tenant))
    front = await setting.front(setting.verifier(limit=9))
    answer = await left_after(front)
    used = 8 + 9
    assert left_of(tenant) == 1000 - used
    for _ in range(3):
        call, _ = await following(front, answer.started.session_id)
        call.cancel()
        async with asyncio.timeout(60):
            while tenant.sessions:
                await asyncio.sleep(0.01)
        assert left_of(tenant) == 1000 - used


def left_of(tenant: Tenant) -> int:
    """Tokens that it may still use this minute."""
    return next(tokens for tokens in range(1001, -1, -1) if not tenant._tokens.wait_s(tokens, 0.0) and tokens <= 1000)
