"""The gateway over real gRPC, with scripted verifiers at the network boundary: one session from begin to end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.support.scripted_gateway import TEXT, Answer, Setting


async def test_a_stream_is_started_deltas_finished_and_agrees_with_its_record(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    answer = await front.generate(max_tokens=40)
    script = front.verifiers[0].script[:40]
    assert answer.tokens == script
    assert answer.text == front.tokenizer.decode(script)
    assert answer.finished.reason == verifier_pb2.FINISH_REASON_LENGTH
    assert answer.finished.output_tokens == 40
    record = await front.record(answer.started.session_id)
    assert list(record.output_token_ids) == answer.tokens
    assert list(record.prompt_token_ids) == list(answer.started.prompt_token_ids)
    assert (record.model, record.seed) == ("toy", answer.started.seed)
    assert record.finish_reason == verifier_pb2.FINISH_REASON_LENGTH
    assert record.statistics == answer.finished.statistics


async def test_statistics_sum_up_the_rounds(setting: Setting) -> None:
    front = await setting.front(setting.verifier(per_round=4))
    statistics = (await front.generate(max_tokens=40)).finished.statistics
    assert (statistics.rounds, statistics.rounds_with_drafts) == (10, 10)
    assert (statistics.drafted, statistics.accepted) == (40, 30)
    assert statistics.wait_s == pytest.approx(0.01)
    assert statistics.verify_s == pytest.approx(0.02)
    assert 0 < statistics.ttft_s <= statistics.e2e_s


async def test_every_option_of_a_request_reaches_the_verifier(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    await front.generate(
        sampling=gateway_pb2.SamplingOptions(temperature=0, top_k=5, seed=2**64 - 1, logit_bias={3: -1.5}),
        speculation=gateway_pb2.SpeculationOptions(max_draft_tokens=2),
        stop_token_ids=[9],
        max_tokens=12,
    )
    (opened,) = front.verifiers[0].opens()
    prompt = front.tokenizer.encode("Tell me.").ids
    assert list(opened.prefix.token_ids) == prompt and opened.prefix.prompt_length == len(prompt)
    assert opened.max_length == len(prompt) + 12
    assert (opened.sampling.temperature, opened.sampling.top_k, opened.sampling.top_p) == (0, 5, 1)
    assert (opened.sampling.seed, dict(opened.sampling.logit_bias)) == (2**64 - 1, {3: -1.5})
    assert list(opened.stop_token_ids) == [setting.eos, 9]
    assert opened.policy.max_draft_tokens == 2
    assert opened.key.epoch == 1


async def test_an_end_of_text_token_ends_the_session_and_is_not_shown(setting: Setting) -> None:
    front = await setting.front(setting.verifier([*setting.tokenizer.encode("héllo").ids, setting.eos, 1, 2]))
    answer = await front.generate()
    assert (answer.text, answer.tokens[-1]) == ("héllo", setting.eos)
    assert answer.finished.reason == verifier_pb2.FINISH_REASON_STOP
    ignoring = await front.generate(ignore_eos=True, max_tokens=8)
    assert ignoring.finished.reason == verifier_pb2.FINISH_REASON_LENGTH


async def test_output_is_capped_by_the_models_length(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    answer = await front.generate(prompt_token_ids=gateway_pb2.TokenIds(token_ids=[1] * 190), max_tokens=10_000)
    assert len(answer.tokens) == 10
    assert answer.finished.reason == verifier_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("per_round", [1, 3, 17])
async def test_a_stop_string_ends_the_text_and_the_record_before_it(setting: Setting, per_round: int) -> None:
    front = await setting.front(setting.verifier(per_round=per_round))
    answer = await front.generate(stop=["lief 🚀", "never"], max_tokens=60)
    text = TEXT[: TEXT.index("lief 🚀")]
    assert answer.text == text
    assert (answer.finished.reason, answer.finished.stop) == (verifier_pb2.FINISH_REASON_STOP, "lief 🚀")
    carrying = len(text.encode())
    assert answer.finished.output_tokens == carrying
    record = await front.record(answer.started.session_id)
    assert list(record.output_token_ids) == front.verifiers[0].script[:carrying]
    assert front.verifiers[0].commands[-1].HasField("close")


async def test_text_held_back_for_a_stop_string_is_shown_when_none_came(setting: Setting) -> None:
    front = await setting.front(setting.verifier("abcSTO"))
    answer = await front.generate(stop=["STOP"], max_tokens=6)
    assert (answer.text, answer.finished.stop) == ("abcSTO", "")


async def test_the_same_seed_is_kept_and_other_sessions_get_their_own(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    chosen = await front.generate(sampling=gateway_pb2.SamplingOptions(seed=0), max_tokens=3)
    drawn = [(await front.generate(max_tokens=3)).started for _ in range(2)]
    assert chosen.started.seed == 0
    assert drawn[0].seed != drawn[1].seed and drawn[0].session_id != drawn[1].session_id


Structured = types_pb2.StructuredOutput

BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "empty prompt": {"prompt": ""},
    "no prompt": {"prompt_token_ids": gateway_pb2.TokenIds()},
    "prompt as long as the model": {"prompt_token_ids": gateway_pb2.TokenIds(token_ids=[1] * 200)},
    "token outside the vocabulary": {"prompt_token_ids": gateway_pb2.TokenIds(token_ids=[1, 260])},
    "text above the limit": {"prompt": "x" * 2000},
    "no tokens asked for": {"max_tokens": 0},
    "negative temperature": {"sampling": gateway_pb2.SamplingOptions(temperature=-0.1)},
    "temperature that is no number": {"sampling": gateway_pb2.SamplingOptions(temperature=float("nan"))},
    "top_p of zero": {"sampling": gateway_pb2.SamplingOptions(top_p=0)},
    "bias outside the vocabulary": {"sampling": gateway_pb2.SamplingOptions(logit_bias={260: 1.0})},
    "empty stop string": {"stop": [""]},
    "long stop string": {"stop": ["é" * 513]},
    "many stop strings": {"stop": ["x"] * 17},
    "many stop tokens": {"stop_token_ids": [1] * 65},
    "stop token outside the vocabulary": {"stop_token_ids": [260]},
    "schema that is no JSON": {"structured_output": Structured(json_schema="{")},
    "regex that is none": {"structured_output": Structured(regex="(a")},
    "grammar with an unknown rule": {"structured_output": Structured(grammar="start: nobody")},
    "any JSON, but not": {"structured_output": Structured(json_object=False)},
    "structure above the limit": {"structured_output": Structured(regex="a" * 65_537)},
    "structured output that must not end": {"structured_output": Structured(json_object=True), "ignore_eos": True},
    "too many log-probabilities": {"logprobs": True, "top_logprobs": 21},
    "log-probabilities of others only": {"top_logprobs": 3},
}


async def test_requests_that_can_never_work_are_invalid_and_reach_no_verifier(setting: Setting) -> None:
    front = await setting.front(setting.verifier(), max_prompt_bytes=1000)
    for name, request in BAD_REQUESTS.items():
        with pytest.raises(InvalidArgument) as caught:
            await front.generate(**request)
        assert caught.value.message.endswith("."), name
    assert front.verifiers[0].commands == []


async def test_unknown_names_are_not_found(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    with pytest.raises(NotFound, match="toy"):
        await front.generate(model="gpt")
    with pytest.raises(NotFound, match="nobody"):
        await front.generate(speculation=gateway_pb2.SpeculationOptions(drafters=["nobody"]))
    for call in (
        front.stub.GetSession(gateway_pb2.GetSessionRequest(session_id="x")),
        front.stub.Cancel(gateway_pb2.CancelRequest(session_id="x" * 100)),
        front.stub.Tokenize(gateway_pb2.TokenizeRequest(model="gpt", text="a")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert isinstance(error_of(caught.value), NotFound)
    with pytest.raises(grpc.RpcError) as caught:
        await front.stub.GetSession(gateway_pb2.GetSessionRequest())
    assert "no session ''" in error_of(caught.value).message, "a client that forgot the id sees that it did"


async def test_tokenize_does_what_generate_does(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    for text in ("Käse", "x" * 5000):
        told = await front.stub.Tokenize(gateway_pb2.TokenizeRequest(text=text))
        assert list(told.token_ids) == front.tokenizer.encode(text).ids


async def test_a_structured_output_is_sent_to_every_verifier_and_stored_in_the_record(setting: Setting) -> None:
    asked = Structured(regex="(One day|.|\\n)*")

    def skipping(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        done.base_length += done.epoch == 1
        return [done]

    front = await setting.front(setting.verifier(mangle=skipping))
    answer = await front.generate(structured_output=asked, logprobs=False)
    assert answer.finished.statistics.rehomed == 1
    assert [opened.structured_output for opened in front.verifiers[0].opens()] == [asked, asked]
    assert not answer.logprobs and not any(each.HasField("top_logprobs") for each in front.verifiers[0].opens())
    record = await front.store.read(answer.started.session_id)
    assert gateway_pb2.GenerateRequest.FromString(record.params).structured_output == asked


async def test_a_grammar_that_this_model_cannot_satisfy_is_a_failed_precondition(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    with pytest.raises(FailedPrecondition) as caught:
        await front.generate(structured_output=Structured(regex=r"[^\s\S]"))
    assert caught.value.reason == "UNSATISFIABLE_GRAMMAR"
    setting.model.vocabulary_fingerprint = "emulated-256"
    front = await setting.front(setting.verifier())
    with pytest.raises(FailedPrecondition) as caught:
        await front.generate(structured_output=Structured(json_object=True))
    assert caught.value.reason == "NO_TOKENIZER"


async def test_cancel_ends_the_stream_and_frees_the_verifier(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    answer = Answer()
    async for event in front.call():
        answer.add(event)
        if len(answer.tokens) == 9:
            for _ in range(2):
                await front.stub.Cancel(gateway_pb2.CancelRequest(session_id=answer.started.session_id))
    assert answer.finished.reason == verifier_pb2.FINISH_REASON_CANCELLED
    await front.verifiers[0].until(lambda: not front.verifiers[0].sessions)
    assert (await front.record(answer.started.session_id)).finish_reason == verifier_pb2.FINISH_REASON_CANCELLED
    await front.stub.Cancel(gateway_pb2.CancelRequest(session_id=answer.started.session_id))


async def test_a_client_that_leaves_frees_the_verifier_and_leaves_a_session_that_waits(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    call, answer = front.call(), Answer()
    while len(answer.tokens) < 9:
        answer.add(await call.read())
    call.cancel()
    await front.verifiers[0].until(lambda: not front.verifiers[0].sessions)
    async with asyncio.timeout(60):
        while (await front.store.read(answer.started.session_id)).leased:
            await asyncio.sleep(0.01)
    record = await front.record(answer.started.session_id)
    assert (record.finish_reason, list(record.output_token_ids)) == (0, answer.tokens)


async def test_a_deadline_ends_the_session_on_the_verifier_too(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    request = gateway_pb2.GenerateRequest(prompt="x", max_tokens=40)
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in front.stub.Generate(request, timeout=0.5):
            pass
    assert isinstance(error_of(caught.value), DeadlineExceeded)
    await front.verifiers[0].until(lambda: not front.verifiers[0].sessions)


async def test_more_sessions_than_allowed_are_refused_and_room_comes_back(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9), max_sessions=1)
    first = front.call()
    await first.read()
    with pytest.raises(ResourceExhausted):
        await front.generate()
    front.verifiers[0].limit = None
    while await first.read() is not grpc.aio.EOF:
        pass
    assert len((await front.generate()).tokens) == 40


async def test_many_sessions_share_one_stream_without_mixing(setting: Setting) -> None:
    front = await setting.front(setting.verifier(per_round=2))
    answers = await asyncio.gather(*(front.generate(max_tokens=10 + index) for index in range(24)))
    for index, answer in enumerate(answers):
        assert answer.tokens == front.verifiers[0].script[: 10 + index]


@pytest.mark.parametrize("source", ["auto", "none"])
async def test_a_models_sampling_parameters_hold_where_a_request_sets_none(setting: Setting, source: str) -> None:
    """And a session that was admitted keeps its own: a record says all, whoever goes on with it."""
    file, backend = setting.folder / "generation_config.json", MemoryBackend()
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    stores = [MemoryStore(backend, owner=owner, ttl_s=60, lease_s=60) for owner in ("one", "two")]
    front = await setting.front(setting.verifier(), store=stores[0], generation_config=source)

    def opened() -> tuple[float, int, float]:
        sampling = front.verifiers[0].opens()[-1].sampling
        return sampling.temperature, sampling.top_k, sampling.min_p

    model = types_pb2.SamplingOptions(temperature=0.6, top_k=20) if source == "auto" else types_pb2.SamplingOptions()
    (listed,) = (await front.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert listed.sampling_defaults == model
    answer = await front.generate(max_tokens=6)
    own = (0.6, 20, 0.0) if source == "auto" else (1.0, 0, 0.0)
    assert opened() == own
    await front.generate(max_tokens=6, sampling=types_pb2.SamplingOptions(temperature=0.9, top_k=0))
    assert opened() == (0.9, 0, 0.0)
    file.write_text(json.dumps({"temperature": 0.2, "min_p": 0.5}))
    there = await setting.beside(front, stores[1])
    await there.generate(max_tokens=6)
    assert opened() == (0.2, 0, 0.5)
    await there.roll_back(answer.started.session_id, 2)
    await there.resume(answer.started.session_id)
    assert opened() == own
