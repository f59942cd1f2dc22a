"""The verifier over real gRPC, spoken to as a gateway does, rightly and wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from slipstream.rpc.multiplexed_stream import SendQueue
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.fleet import Decoded, Gateway, VerifierServer, drafter, gateway, opening, until, verifier
from tests.support.fleet import emulated_text as text
from verifier_svc.wait_policy.drafting_trial import DraftingTrial

PROMPT = [7, 8, 9]
CLOSE = verifier_pb2.DecodeClose()


def target(settings: str = "", kv_tokens: int = 65_536) -> Engine:
    return open_engine(f"emulated:{settings}", kv_tokens=kv_tokens)


@pytest.fixture
async def server() -> AsyncIterator[VerifierServer]:
    async with verifier(target("base_ms=5"), always_speculate=True) as server:  # whether it pays or not
        yield server


@pytest.fixture
async def client(server: VerifierServer) -> AsyncIterator[Gateway]:
    async with gateway(server.address) as client:
        yield client


@pytest.fixture
async def guesses() -> AsyncIterator[str]:
    async with drafter(target("acceptance=0.8")) as address:
        yield address


async def ended(decoded: Decoded) -> verifier_pb2.SessionEnd:
    async with asyncio.timeout(60):
        await decoded.done.wait()
    assert decoded.end is not None
    return decoded.end


async def code(decoded: Decoded) -> grpc.StatusCode | None:
    number = (await ended(decoded)).failure.code
    return next((code for code in grpc.StatusCode if code.value[0] == number), None)


def free(server: VerifierServer) -> Callable[[], bool]:
    return lambda: server.kv.blocks_free == server.kv.blocks_total and not len(server.scheduler)


# Ends.


@pytest.mark.parametrize("speculate", [False, True])
async def test_a_session_ends_with_the_first_stop_token_it_commits(
    client: Gateway, guesses: str, speculate: bool
) -> None:
    words = text(PROMPT, 40)
    stop = words[20]
    decoded = await client.decode(PROMPT, tokens=40, stop=[stop], drafters=[guesses] if speculate else [])
    assert decoded.token_ids == words[: words.index(stop) + 1]
    assert (await ended(decoded)).reason == verifier_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
async def test_a_session_never_exceeds_its_length(client: Gateway, guesses: str, tokens: int) -> None:
    decoded = await client.decode(PROMPT, tokens=tokens, drafters=[guesses], max_draft_tokens=16)
    assert decoded.token_ids == text(PROMPT, tokens)
    assert (await ended(decoded)).reason == verifier_pb2.FINISH_REASON_LENGTH


async def test_closing_mid_flight_frees_the_memory_and_the_number(
    server: VerifierServer, client: Gateway, guesses: str
) -> None:
    number, decoded = await client.open(PROMPT, tokens=5000, drafters=[guesses])
    await until(lambda: len(decoded.rounds) > 3)
    assert server.kv.blocks_free < server.kv.blocks_total
    await client.command(number, close=CLOSE)
    assert (await ended(decoded)).reason == verifier_pb2.FINISH_REASON_CANCELLED
    await until(free(server))
    rounds = len(decoded.rounds)
    await client.command(number, close=CLOSE)  # of a session that is gone: ignored
    assert (await client.decode(PROMPT, tokens=5)).token_ids == text(PROMPT, 5)
    assert len(decoded.rounds) == rounds


async def test_a_broken_stream_takes_its_sessions_along(server: VerifierServer, guesses: str) -> None:
    async with gateway(server.address) as other:
        sessions = [await other.open([seed, 1], tokens=5000, drafters=[guesses]) for seed in range(5)]
        await until(lambda: all(decoded.rounds for _, decoded in sessions))
    await until(free(server))
    assert server.service.by_id == {}


async def test_an_error_beside_the_end_of_a_session_leaves_none_of_its_memory_behind(
    server: VerifierServer, client: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, decoded = await client.open(PROMPT, tokens=5000)
    await until(lambda: len(decoded.rounds) > 3)

    def detach(session: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(server.scheduler._sources, "detach_session", detach)
        await client.command(number, close=CLOSE)
        await ended(decoded)
        await until(free(server))
    assert server.service.by_id == {}
    async with gateway(server.address) as other:
        assert (await other.decode(PROMPT, tokens=5)).token_ids == text(PROMPT, 5)


async def test_texts_that_end_in_their_first_rounds_leave_no_try_of_drafting_behind(
    monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    monkeypatch.setattr(DraftingTrial, "slowdown", 1.5)
    async with verifier(target("base_ms=1")) as server, gateway(server.address) as client:
        for _ in range(4):
            await client.decode(PROMPT, tokens=2, drafters=[guesses])
        await until(free(server))
        assert server.scheduler._planner._wait_policy.new_session().drafting


async def test_a_stream_that_is_no_protobuf_ends_and_others_go_on(server: VerifierServer, client: Gateway) -> None:
    _, decoded = await client.open(PROMPT, tokens=60)
    async with channel(server.address) as line:
        call = line.stream_stream("/slipstream.v1.VerifierService/Decode")()
        await call.write(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.RpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await ended(decoded)
    assert decoded.token_ids == text(PROMPT, 60)


async def test_a_gateway_that_does_not_read_loses_its_stream_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SendQueue.__init__, "__defaults__", (200,))
    window = grpc.aio.insecure_channel
    async with verifier(target()) as server, window(server.address, [("grpc.http2.bdp_probe", 0)]) as line:
        call = verifier_pb2_grpc.VerifierServiceStub(line).Decode()
        commands = [
            verifier_pb2.DecodeCommand(
                session=number, epoch=1, open=opening(PROMPT, tokens=3000, session_id=f"session-{number}")
            )
            for number in range(20)
        ]
        await call.write(verifier_pb2.DecodeRequest(commands=commands))
        await until(lambda: len(server.scheduler) == 20)
        await until(free(server))
        with pytest.raises(grpc.RpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_frame_above_the_limit_ends_the_stream(server: VerifierServer) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address, unlimited) as line:
        call = line.stream_stream("/slipstream.v1.VerifierService/Decode")()
        with pytest.raises(grpc.RpcError) as caught:
            await call.write(b"x" * (5 << 20))
            await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# Flow control and policies.


async def test_a_session_without_credit_stops_exactly_there_and_resumes_with_more(
    server: VerifierServer, client: Gateway, guesses: str
) -> None:
    number, decoded = await client.open(PROMPT, tokens=60, drafters=[guesses], credit=5)
    await until(lambda: len(decoded.token_ids) >= 5)
    other = await client.decode([1, 2], tokens=30, drafters=[guesses])
    assert other.token_ids == text([1, 2], 30)
    assert len(decoded.token_ids) == 5
    await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=10))
    await until(lambda: len(decoded.token_ids) >= 15)
    await client.decode([1, 2], tokens=10)
    assert len(decoded.token_ids) == 15
    await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=1000))
    await ended(decoded)
    assert decoded.token_ids == text(PROMPT, 60)


async def test_drafters_are_replaced_while_a_session_runs(client: Gateway, guesses: str) -> None:
    number, decoded = await client.open(PROMPT, tokens=50_000)
    await until(lambda: len(decoded.rounds) > 3)
    drafters = [verifier_pb2.DrafterAddress(address=guesses, name="late")] * 2
    await client.command(number, attach=verifier_pb2.DecodeAttach(drafters=drafters))
    await until(lambda: decoded.accepted > 10)
    await client.command(number, attach=verifier_pb2.DecodeAttach())
    await client.decode([1], tokens=3)
    await client.command(number, close=CLOSE)
    await ended(decoded)
    assert decoded.token_ids == text(PROMPT, len(decoded.token_ids))
    assert not any(event.HasField("failure") for event in decoded.events)


@pytest.mark.parametrize("most", [0, 4])
async def test_no_step_verifies_more_candidates_than_the_session_may_have(
    client: Gateway, guesses: str, most: int
) -> None:
    number, decoded = await client.open(PROMPT, tokens=4000, drafters=[guesses], max_draft_tokens=most)
    await until(lambda: len(decoded.rounds) > 20 and decoded.accepted >= 5 * most)
    await client.command(number, close=CLOSE)
    await ended(decoded)
    assert max(done.drafted for done in decoded.rounds) <= most
    assert decoded.token_ids == text(PROMPT, len(decoded.token_ids))


async def test_a_drafter_named_twice_drafts_once(client: Gateway, guesses: str) -> None:
    number, decoded = await client.open(PROMPT, tokens=50_000, drafters=[guesses, guesses])
    await until(lambda: decoded.accepted > 10)
    assert [event.HasField("failure") for event in decoded.events] == [False]
    await client.command(number, close=CLOSE)
    await ended(decoded)


# Fencing.


async def test_of_two_gateways_the_higher_epoch_owns_the_session(server: VerifierServer, client: Gateway) -> None:
    _, first = await client.open(PROMPT, tokens=4000, session_id="s")
    await until(lambda: bool(first.rounds))
    async with gateway(server.address) as other:
        _, late = await other.open(PROMPT, tokens=10, session_id="s", epoch=1)
        assert await code(late) is grpc.StatusCode.ABORTED
        assert first.end is None
        _, winner = await other.open(PROMPT, tokens=10, session_id="s", epoch=2)
        assert await code(first) is grpc.StatusCode.ABORTED
        await ended(winner)
        assert winner.token_ids == text(PROMPT, 10)
    await until(free(server))


async def test_a_refused_open_of_a_higher_epoch_fences_no_session(server: VerifierServer, client: Gateway) -> None:
    _, first = await client.open(PROMPT, tokens=100, session_id="s")
    await until(lambda: bool(first.rounds))
    async with gateway(server.address) as other:
        rejection = SamplingParams(acceptance="rejection")
        _, bad = await other.open(PROMPT, session_id="s", epoch=2, sampling=rejection, drafters=["127.0.0.1:1"])
        assert await code(bad) is grpc.StatusCode.PERMISSION_DENIED
    assert (await ended(first)).reason == verifier_pb2.FINISH_REASON_LENGTH


# Refusals.


def spoil_prefix(request: verifier_pb2.DecodeOpen) -> None:
    request.prefix.token_ids[1] = 256


def spoil_all(request: verifier_pb2.DecodeOpen) -> None:
    request.Clear()


MALFORMED: dict[str, Callable[[verifier_pb2.DecodeOpen], Any]] = {
    "everything missing": spoil_all,
    "no id": lambda request: request.key.ClearField("id"),
    "long id": lambda request: setattr(request.key, "id", "x" * 65),
    "no prefix": lambda request: request.ClearField("prefix"),
    "no prompt": lambda request: request.prefix.ClearField("prompt_length"),
    "prompt longer than prefix": lambda request: setattr(request.prefix, "prompt_length", 4),
    "token out of range": spoil_prefix,
    "no room": lambda request: setattr(request, "max_length", 3),
    "longer than the model": lambda request: setattr(request, "max_length", (1 << 20) + 1),
    "bias out of range": lambda request: request.sampling.logit_bias.update({256: 1.0}),
    "allowed token out of range": lambda request: request.sampling.allowed_token_ids.append(256),
    "bad word out of range": lambda request: request.sampling.bad_words_ids.add(token_ids=[1, 256]),
    "too many bad words": lambda request: request.sampling.bad_words_ids.add(token_ids=[1] * 1025),
    "a bad word without tokens": lambda request: request.sampling.bad_words_ids.add(),
    "all tokens are bad words": lambda request: [
        request.sampling.bad_words_ids.add(token_ids=[token]) for token in range(256)
    ],
    "a mark out of range": lambda request: request.reasoning_limit.MergeFrom(
        types_pb2.ReasoningLimit(begin_token_id=1, end_token_id=256)
    ),
    "one mark for both ends": lambda request: request.reasoning_limit.MergeFrom(types_pb2.ReasoningLimit()),
    "too many allowed tokens": lambda request: request.sampling.allowed_token_ids.extend([1] * 1025),
    "huge bias": lambda request: request.sampling.logit_bias.update({1: 1e9}),
    "nan temperature": lambda request: setattr(request.sampling, "temperature", float("nan")),
    "negative temperature": lambda request: setattr(request.sampling, "temperature", -1.0),
    "top_p zero": lambda request: setattr(request.sampling, "top_p", 0.0),
    "no sampling": lambda request: request.ClearField("sampling"),
    "nameless drafter": lambda request: request.drafters.add(),
}


@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_open_costs_itself_only(
    server: VerifierServer, client: Gateway, spoil: Callable[[verifier_pb2.DecodeOpen], Any]
) -> None:
    _, running = await client.open(PROMPT, tokens=30)
    request = opening(PROMPT, session_id="odd")
    spoil(request)
    bad = client.sessions[99] = Decoded()
    await client.command(99, open=request)
    assert await code(bad) is grpc.StatusCode.INVALID_ARGUMENT
    # Number and id are free again.
    again = client.sessions[99] = Decoded()
    await client.command(99, open=opening(PROMPT, session_id="odd", tokens=9))
    await ended(again)
    assert again.token_ids == text(PROMPT, 9)
    await ended(running)
    assert running.token_ids == text(PROMPT, 30)
    await until(free(server))


async def test_an_empty_command_ends_its_session_only(client: Gateway) -> None:
    number, decoded = await client.open(PROMPT, tokens=4000)
    _, running = await client.open(PROMPT, tokens=30)
    await client.command(number)
    assert await code(decoded) is grpc.StatusCode.INVALID_ARGUMENT
    await ended(running)
    assert running.token_ids == text(PROMPT, 30)


async def test_a_number_in_use_is_refused_and_its_session_goes_on(client: Gateway) -> None:
    number, decoded = await client.open(PROMPT, tokens=200)
    await until(lambda: bool(decoded.rounds))
    await client.command(number, 7, open=opening([1, 2], session_id="other"))
    assert await code(decoded) is grpc.StatusCode.INVALID_ARGUMENT
    assert decoded.end is not None and decoded.end.epoch == 7
    decoded.done.clear()
    await ended(decoded)
    assert decoded.token_ids == text(PROMPT, 200)


async def test_a_repeated_open_counts_once(client: Gateway) -> None:
    number, decoded = await client.open(PROMPT, tokens=200, session_id="mine")
    await client.command(number, 1, open=opening(PROMPT, tokens=200, session_id="mine"))
    assert (await ended(decoded)).reason == verifier_pb2.FINISH_REASON_LENGTH
    assert decoded.token_ids == text(PROMPT, 200)


async def test_a_ratio_rule_needs_trusted_drafters(server: VerifierServer, client: Gateway, guesses: str) -> None:
    sampling = SamplingParams(acceptance="rejection", seed=3)
    _, refused = await client.open(PROMPT, sampling=sampling, drafters=[guesses], session_id="s")
    assert await code(refused) is grpc.StatusCode.PERMISSION_DENIED
    number, decoded = await client.open(
        PROMPT, tokens=400, sampling=sampling, drafters=[guesses], session_id="s", trusted=True
    )
    await until(lambda: decoded.accepted > 5)
    untrusted = verifier_pb2.DrafterAddress(address=guesses)
    await client.command(number, attach=verifier_pb2.DecodeAttach(drafters=[untrusted]))
    assert await code(decoded) is grpc.StatusCode.PERMISSION_DENIED
    await until(free(server))


async def test_sessions_that_do_not_all_fit_into_memory_take_turns_and_only_what_never_fits_is_refused() -> None:
    async with verifier(target("base_ms=1", kv_tokens=320)) as server, gateway(server.address) as client:
        async with channel(server.address) as line:
            told = await worker_pb2_grpc.WorkerServiceStub(line).GetModel(worker_pb2.GetModelRequest())
        assert told.model.max_length == 320  # gateways refuse longer texts themselves
        running = [await client.open([seed, 1], tokens=200) for seed in range(3, 9)]
        refused = await client.decode(PROMPT, tokens=320)
        assert await code(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.end is not None and refused.end.failure.reason == "KV_TOO_SMALL"
        for seed, (_, decoded) in enumerate(running, 3):
            await ended(decoded)
            assert decoded.token_ids == text([seed, 1], 200)
        assert server.scheduler.kv_admission.preemptions > 0
        await until(free(server))


async def test_more_sessions_than_allowed_are_refused() -> None:
    async with verifier(target("base_ms=1"), max_sessions=2) as server, gateway(server.address) as client:
        running = [await client.open([seed, 1], tokens=4000) for seed in (3, 4)]
        _, refused = await client.open(PROMPT)
        assert await code(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        number, decoded = running[0]
        await client.command(number, close=CLOSE)
        await ended(decoded)
        assert (await client.decode(PROMPT, tokens=5)).token_ids == text(PROMPT, 5)


async def test_a_tenant_with_most_sessions_leaves_some_to_others() -> None:
    async with verifier(target("base_ms=1"), max_sessions=16) as server, gateway(server.address) as client:
        running = [await client.open([seed, 1], tokens=4000, tenant="alice") for seed in range(14)]
        _, refused = await client.open(PROMPT, tenant="alice")
        assert await code(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.decode(PROMPT, tokens=5, tenant="bob")).token_ids == text(PROMPT, 5)
        assert not any(decoded.done.is_set() for _, decoded in running)


# Sharing of steps.


async def test_a_long_prompt_does_not_stall_sessions_that_decode() -> None:
    async with verifier(target(), prefill_tokens=32) as server, gateway(server.address) as client:
        _, decoding = await client.open(PROMPT, tokens=20_000)
        await until(lambda: bool(decoding.rounds))
        steps = server.scheduler.steps
        _, long = await client.open([5] * 3200, tokens=1)
        await ended(long)
        taken = server.scheduler.steps - steps
        assert taken >= 100
        assert long.token_ids == text([5] * 3200, 1)
        await until(lambda: len(decoding.rounds) >= taken - 5)
        assert decoding.end is None


async def test_candidates_leave_room_for_a_prompt_in_each_step(guesses: str) -> None:
    """Sessions that speculate once filled every step to the last token, and a new prompt waited for their end."""
    async with (
        verifier(target("base_ms=2"), step_tokens=16, prefill_tokens=8, always_speculate=True) as server,
        gateway(server.address) as client,
    ):
        options: dict[str, Any] = {"tokens": 10_000, "drafters": [guesses], "max_draft_tokens": 16}
        sessions = [await client.open([seed, 1], **options) for seed in range(4)]
        await until(lambda: all(decoded.accepted > 10 for _, decoded in sessions))
        assert (await client.decode([9] * 200, tokens=2)).token_ids == text([9] * 200, 2)


async def test_more_sessions_than_a_step_has_room_for_take_turns() -> None:
    async with verifier(target("base_ms=1"), step_tokens=4) as server, gateway(server.address) as client:
        sessions = await client.open_at_once([[seed] for seed in range(12)], tokens=60)
        await until(lambda: any(decoded.done.is_set() for decoded in sessions))
        assert min(len(decoded.token_ids) for decoded in sessions) > 40


# What others ask.


async def test_a_verifier_reports_its_model_and_its_load(server: VerifierServer, client: Gateway) -> None:
    async with channel(server.address) as line:
        stub = worker_pb2_grpc.WorkerServiceStub(line)
        told = await stub.GetModel(worker_pb2.GetModelRequest())
        assert told.role == worker_pb2.ROLE_VERIFIER
        assert told.model.vocabulary_size == 256
        watch = stub.Watch(worker_pb2.WatchRequest())
        assert (await watch.read()).sessions == 0
        number, _ = await client.open(PROMPT, tokens=5000)
        async with asyncio.timeout(60):
            while (load := await watch.read()).kv_blocks_free == load.kv_blocks_total:
                pass
            assert load.sessions == 1
            await client.command(number, close=CLOSE)
            while (load := await watch.read()).sessions:
                pass
        watch.cancel()
