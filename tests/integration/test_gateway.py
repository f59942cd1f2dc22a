"""The gateway over real gRPC, with scripted verifiers and a counting drafter at the network boundary."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewayConfig
from gateway.gateway import World, running
from gateway.sessions import Chance
from gateway.store.client import connect
from gateway.store.memory import Memory, MemoryStore
from gateway.store.redis import RedisStore
from slipstream.client import channel, error_of
from slipstream.completion import Completion
from slipstream.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
)
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2, verifier_pb2
from tests.front import TEXT, Answer, Front, Setting
from tests.scripted_verifier import served


async def test_the_stream_is_started_deltas_finished_and_the_record_says_the_same(setting: Setting) -> None:
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


async def test_the_verifier_is_told_everything_that_was_asked(setting: Setting) -> None:
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
    "long stop string": {"stop": ["é" * 33]},
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


async def test_tokenize_does_what_generate_does(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    for text in ("Käse", "x" * 5000):
        told = await front.stub.Tokenize(gateway_pb2.TokenizeRequest(text=text))
        assert list(told.token_ids) == front.tokenizer.encode(text).ids


async def test_drafters_are_paired_by_name_vocabulary_and_method(setting: Setting) -> None:
    good, twin, ngram = await setting.drafter(), await setting.drafter(), await setting.drafter("ngram")
    odd = await setting.drafter(vocabulary_fingerprint="f00d", name="odd-model")
    front = await setting.front(
        setting.verifier(), drafters=(f"good={good}", f"twin={twin}", f"ngram={ngram}", f"odd={odd}")
    )
    while any(not drafter.present for drafter in front.gateway.router.drafters):
        await front.gateway.router.news()
    await front.generate(max_tokens=3)
    await front.generate(max_tokens=3, speculation=gateway_pb2.SpeculationOptions(drafters=["twin"]))
    await front.generate(max_tokens=3, speculation=gateway_pb2.SpeculationOptions(disabled=True))
    named = [[drafter.name for drafter in opened.drafters] for opened in front.verifiers[0].opens()]
    assert named == [["good", "ngram"], ["twin"], []]
    assert front.verifiers[0].opens()[2].policy.max_draft_tokens == 0
    with pytest.raises(FailedPrecondition, match="f00d") as caught:
        await front.generate(speculation=gateway_pb2.SpeculationOptions(drafters=["odd"]))
    assert setting.model.vocabulary_fingerprint in caught.value.message
    listed = await front.stub.ListModels(gateway_pb2.ListModelsRequest())
    assert [bool(drafter.mismatch) for drafter in listed.models[0].drafters] == [False, False, False, True]
    assert (listed.models[0].model.name, listed.models[0].verifiers) == ("toy", 1)


async def known(front: Front) -> None:
    """All drafters have introduced themselves."""
    while any(not drafter.present for drafter in front.gateway.router.drafters):
        await front.gateway.router.news()


async def test_a_prediction_brings_its_drafter_and_none_leaves_it_out(setting: Setting) -> None:
    model, prediction = await setting.drafter(), await setting.drafter("prediction")
    front = await setting.front(setting.verifier(), drafters=(f"m={model}", f"p={prediction}"))
    await known(front)
    expected = gateway_pb2.Prediction(text="Käse")
    named = gateway_pb2.SpeculationOptions(drafters=["p"])
    await front.generate(max_tokens=3)
    answer = await front.generate(max_tokens=3, prediction=expected, workload="edit", cache_salt="acme")
    await front.generate(max_tokens=3, prediction=expected, speculation=named)
    opens = front.verifiers[0].opens()
    assert [[drafter.name for drafter in opened.drafters] for opened in opens] == [["m"], ["m", "p"], ["p"]]
    ids = front.tokenizer.encode("Käse").ids
    assert [list(opened.prediction_token_ids) for opened in opens] == [[], ids, ids]
    assert (opens[1].workload, opens[1].cache_salt) == ("edit", "acme")
    record = await front.store.read(answer.started.session_id)
    asked = gateway_pb2.GenerateRequest.FromString(record.params)
    assert (asked.workload, asked.cache_salt, list(asked.prediction.token_ids.token_ids)) == ("edit", "acme", ids)
    with pytest.raises(InvalidArgument, match="prediction") as caught:
        await front.generate(speculation=named)
    assert caught.value.reason == "NO_PREDICTION"


async def test_rules_choose_drafters_for_requests_that_name_none(setting: Setting) -> None:
    model, ngram, prediction = [await setting.drafter(method) for method in ("model", "ngram", "prediction")]
    front = await setting.front(
        setting.verifier(),
        drafters=(f"m={model}", f"n={ngram}", f"p={prediction}"),
        rules="max_tokens<3: off; workload=chat: drafters=n+p; salt=acme: drafters=p max_draft_tokens=2",
    )
    await known(front)
    expected = gateway_pb2.Prediction(text="x")
    for request in (
        {"max_tokens": 2},
        {"workload": "chat"},
        {"workload": "chat", "prediction": expected},
        {"workload": "chat", "speculation": gateway_pb2.SpeculationOptions(drafters=["m"])},
        {"max_tokens": 2, "speculation": gateway_pb2.SpeculationOptions(drafters=["m"])},
        {"cache_salt": "acme"},
        {"workload": "other", "cache_salt": "else"},
    ):
        await front.generate(**{"max_tokens": 4} | request)
    opens = front.verifiers[0].opens()
    names = [sorted(drafter.name for drafter in opened.drafters) for opened in opens]
    assert names == [[], ["n"], ["n", "p"], ["m"], ["m"], [], ["m", "n"]]
    assert [opened.policy.max_draft_tokens for opened in opens] == [0, 8, 8, 8, 8, 2, 8]


async def test_a_client_is_told_who_guessed_and_why_nothing_was_there(setting: Setting) -> None:
    def shared(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        shares = [
            verifier_pb2.DrafterShare(drafter=name, drafted=done.drafted, accepted=done.accepted) for name in ("m", "p")
        ]
        done.drafters.extend(shares)
        done.miss = verifier_pb2.MISS_CAUSE_OPENING if done.base_length == prompt else done.miss
        done.bubble_us = 100
        return [done]

    prompt = len(setting.tokenizer.encode("Tell me.").ids)
    model, prediction = await setting.drafter(), await setting.drafter("prediction")
    verifier = setting.verifier(per_round=4, mangle=shared)
    front = await setting.front(verifier, drafters=(f"m={model}", f"p={prediction}"))
    await known(front)
    expected = gateway_pb2.Prediction(text="x")
    told = (await front.generate(max_tokens=40, prediction=expected)).finished.statistics
    assert (told.hits, dict(told.misses), told.bubble_s) == (9, {"opening": 1}, pytest.approx(1e-3))
    assert [(one.name, one.drafted, one.accepted) for one in told.drafters] == [("m", 40, 30), ("p", 40, 30)]
    assert (told.accepted_prediction_tokens, told.rejected_prediction_tokens) == (30, 10)
    plain = gateway_pb2.SpeculationOptions(disabled=True)
    told = (await front.generate(max_tokens=40, speculation=plain)).finished.statistics
    assert (told.hits, dict(told.misses)) == (0, {})


async def test_a_structure_is_told_to_every_verifier_and_kept_in_the_record(setting: Setting) -> None:
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


async def test_what_this_model_cannot_write_is_a_failed_precondition(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    with pytest.raises(FailedPrecondition) as caught:
        await front.generate(structured_output=Structured(regex=r"[^\s\S]"))
    assert caught.value.reason == "UNSATISFIABLE_GRAMMAR"
    setting.model.vocabulary_fingerprint = "emulated-256"
    front = await setting.front(setting.verifier())
    with pytest.raises(FailedPrecondition) as caught:
        await front.generate(structured_output=Structured(json_object=True))
    assert caught.value.reason == "NO_TOKENIZER"


def likely(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
    """The i-th token of the text has log-probability -i, and token 65 is always the likeliest."""
    for index in range(len(done.token_ids)):
        told = done.logprobs.add(logprob=-float(done.base_length + index))
        told.top_token_ids.extend([65, done.token_ids[index]])
        told.top_logprobs.extend([0.0, told.logprob])
    return [done]


async def test_log_probabilities_come_with_their_tokens_and_words(setting: Setting) -> None:
    front = await setting.front(setting.verifier(mangle=likely))
    answer = await front.generate(logprobs=True, top_logprobs=2)
    (opened,) = front.verifiers[0].opens()
    assert opened.top_logprobs == 2
    start = len(answer.started.prompt_token_ids)
    assert [one.token.token_id for one in answer.logprobs] == answer.tokens
    assert [one.logprob for one in answer.logprobs] == [-float(start + index) for index in range(40)]
    assert b"".join(one.token.bytes for one in answer.logprobs).decode(errors="replace") == answer.text
    assert {one.top[0].token.token_id for one in answer.logprobs} == {65}
    assert answer.logprobs[0].token.text == "O" and answer.logprobs[0].top[1].token.text == "O"
    assert (await front.generate(logprobs=True)).logprobs[0].logprob == -float(start)


async def test_log_probabilities_of_a_special_token_have_its_name_and_no_bytes(setting: Setting) -> None:
    front = await setting.front(setting.verifier([66, setting.eos], mangle=likely))
    end = (await front.generate(logprobs=True)).logprobs[-1].token
    assert (end.token_id, end.text, end.bytes) == (setting.eos, "<eos>", b"")


@pytest.mark.parametrize("per_round", [1, 3, 17])
async def test_a_stop_string_cuts_log_probabilities_with_their_tokens(setting: Setting, per_round: int) -> None:
    front = await setting.front(setting.verifier(per_round=per_round, mangle=likely))
    completion = Completion()
    async for event in front.call(stop=["lief 🚀"], max_tokens=60, logprobs=True):
        completion.take(event)
    assert 0 < len(completion.token_ids) == completion.finished.output_tokens == len(completion.logprobs)
    assert [one.token.token_id for one in completion.logprobs] == completion.token_ids


async def test_rounds_without_the_log_probabilities_that_were_asked_for_cost_a_rehoming(setting: Setting) -> None:
    def lazy(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        return likely(done) if done.epoch > 1 or done.base_length < 20 else [done]

    front = await setting.front(setting.verifier(mangle=lazy))
    answer = await front.generate(logprobs=True)
    assert answer.finished.statistics.rehomed == 1
    assert [one.token.token_id for one in answer.logprobs] == answer.tokens == front.verifiers[0].script[:40]
    with pytest.raises(Unavailable):  # nor are they sent to who did not ask
        await (await setting.front(setting.verifier(mangle=likely))).generate()


async def test_the_ratio_rule_needs_a_trusted_drafter(setting: Setting) -> None:
    rejection = gateway_pb2.SamplingOptions(acceptance=types_pb2.ACCEPTANCE_RULE_REJECTION)
    address = await setting.drafter()
    untrusting = await setting.front(setting.verifier(), drafters=(f"model={address}",))
    for names in ([], ["model"]):
        with pytest.raises(PermissionDenied, match="GATEWAY_TRUSTED_DRAFTERS"):
            await untrusting.generate(sampling=rejection, speculation=gateway_pb2.SpeculationOptions(drafters=names))
    trusting = await setting.front(setting.verifier(), drafters=(f"m={address}",), trusted_drafters=("m",))
    named = gateway_pb2.SpeculationOptions(drafters=["m"])
    await trusting.generate(sampling=rejection, speculation=named, max_tokens=3)
    (opened,) = trusting.verifiers[0].opens()
    assert opened.drafters[0].trusted
    assert opened.sampling.acceptance == types_pb2.ACCEPTANCE_RULE_REJECTION


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
    async with asyncio.timeout(5):
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

    store = Waiting(Memory(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(per_round=4), store=store, credit_tokens=8)
    (verifier,) = front.verifiers
    call = asyncio.create_task(front.generate())
    await verifier.until(lambda: any(session.output >= 8 for session in verifier.sessions.values()))
    steps = verifier.steps
    await verifier.until(lambda: verifier.steps > steps + 5)
    assert [session.output for session in verifier.sessions.values()] == [8]
    store.gate.set()
    assert (await call).tokens == verifier.script[:40]


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
    store = Flaky(Memory(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(), store=store, store_grace_s=0.3)
    answer = Answer()
    with pytest.raises(grpc.RpcError) as caught:
        async for event in front.call():
            answer.add(event)
    error = error_of(caught.value)
    assert isinstance(error, Unavailable) and error.reason == "STORE_UNAVAILABLE"
    assert list((await store.read(answer.started.session_id)).tokens[8:]) == answer.tokens


async def test_relaxed_sessions_go_on_and_the_log_catches_up_in_order(setting: Setting) -> None:
    store = Flaky(Memory(), owner="me", ttl_s=60, lease_s=60)
    front = await setting.front(setting.verifier(), store=store, durability="relaxed")
    answer = await front.generate(stop=["lief"], max_tokens=60)
    assert answer.text == TEXT[: TEXT.index("lief")]
    store.down = False
    async with asyncio.timeout(5):
        while not (record := await front.record(answer.started.session_id)).finish_reason:
            await asyncio.sleep(0.01)
    assert len(record.output_token_ids) == answer.finished.output_tokens
    assert list(record.output_token_ids) == answer.tokens[: answer.finished.output_tokens]


async def test_a_session_taken_over_by_another_gateway_ends(setting: Setting) -> None:
    memory = Memory()
    store = MemoryStore(memory, owner="me", ttl_s=60, lease_s=0)
    front = await setting.front(setting.verifier(limit=9), store=store)
    answer = Answer()
    with pytest.raises(grpc.RpcError) as caught:
        async for event in front.call():
            answer.add(event)
            if len(answer.tokens) == 9 and event.HasField("delta"):
                taken = await MemoryStore(memory, owner="other", ttl_s=60, lease_s=60).takeover(
                    answer.started.session_id
                )
                front.verifiers[0].limit = None
    assert error_of(caught.value).code is grpc.StatusCode.ABORTED
    assert await store.read(answer.started.session_id) == taken


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


async def test_a_verifier_with_another_vocabulary_is_never_used(setting: Setting) -> None:
    odd = setting.verifier()
    odd.model = types_pb2.ModelInfo(name="odd", vocabulary_fingerprint="f00d", vocabulary_size=260, max_length=200)
    front = await setting.front(odd, setting.verifier())
    with pytest.raises(NotFound):
        await front.generate(model="odd")
    assert len((await front.generate()).tokens) == 40
    assert odd.commands == []


async def test_a_stuck_verifier_loses_its_sessions_to_another(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9), setting.verifier(limit=9), stall_s=0.3)
    answer = Answer()
    async for event in front.call():
        answer.add(event)
        if len(answer.tokens) == 9 and event.HasField("delta"):
            stuck = next(index for index, verifier in enumerate(front.verifiers) if verifier.sessions)
            front.verifiers[stuck].frozen = True
            front.verifiers[1 - stuck].limit = None
    assert answer.tokens == front.verifiers[0].script[:40]
    assert answer.finished.statistics.rehomed == 1


@asynccontextmanager
async def lonely(setting: Setting, folder: Path) -> AsyncIterator[Any]:
    """A gateway whose verifier cannot be reached."""
    config = GatewayConfig(verifiers=("127.0.0.1:1",), tokenizer=str(folder), listen="127.0.0.1:0", grace_s=0.0)
    world = World(Chance(random.Random(7).getrandbits))
    async with running(config, world) as gateway, channel(gateway.address) as line:
        yield gateway_pb2_grpc.GatewayServiceStub(line)


async def test_without_any_verifier_requests_are_unavailable(setting: Setting, folder: Path) -> None:
    async with lonely(setting, folder) as stub:
        for call in (
            stub.ListModels(gateway_pb2.ListModelsRequest()),
            stub.Tokenize(gateway_pb2.TokenizeRequest(text="a")),
            stub.Generate(gateway_pb2.GenerateRequest(prompt="a")).read(),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await call
            error: SlipstreamError = error_of(caught.value)
            assert isinstance(error, Unavailable) and error.reason == "NO_VERIFIER"


async def announced(process: asyncio.subprocess.Process) -> str:
    """The address in the line that a process prints when it can serve."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("ready grpc=127.0.0.1:"), line
    return line.strip().removeprefix("ready grpc=")


@asynccontextmanager
async def gateway_process(folder: Path, verifier: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    environ |= {"GATEWAY_TOKENIZER": str(folder), "GATEWAY_VERIFIERS": verifier, "GATEWAY_LISTEN": "127.0.0.1:0"}
    environ |= {f"GATEWAY_{name.upper()}": value for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environ, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_process_says_when_it_is_ready_and_finishes_its_sessions_on_sigterm(
    setting: Setting, folder: Path, redis_url: str
) -> None:
    verifier = setting.verifier(limit=9)
    async with served(verifier) as (address, _), gateway_process(folder, address, store=redis_url) as process:
        target = await announced(process)
        async with channel(target) as line:
            stub = gateway_pb2_grpc.GatewayServiceStub(line)
            health = health_pb2_grpc.HealthStub(line)
            told = await health.Check(health_pb2.HealthCheckRequest())
            assert told.status == health_pb2.HealthCheckResponse.SERVING
            answer = Answer()
            async for event in stub.Generate(gateway_pb2.GenerateRequest(prompt="x", max_tokens=40)):
                answer.add(event)
                if len(answer.tokens) == 9 and event.HasField("delta"):
                    process.terminate()
                    verifier.limit = None
        assert answer.tokens == verifier.script[:40]
        assert await process.wait() == 0
    store = RedisStore(connect(redis_url), owner="reader", ttl_s=60, lease_s=60)
    assert list((await store.read(answer.started.session_id)).tokens[1:]) == answer.tokens
    await store.close()


async def test_a_process_that_waits_for_its_verifier_is_not_serving_and_ends_on_sigterm(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    async with gateway_process(folder, "127.0.0.1:1", listen=listen) as process:
        async with channel(listen) as line:
            check = health_pb2.HealthCheckRequest()
            told = await health_pb2_grpc.HealthStub(line).Check(check, wait_for_ready=True, timeout=30)
        assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING
        process.terminate()
        assert await process.wait() == 0


async def test_a_process_with_a_wrong_setting_says_which(folder: Path) -> None:
    async with gateway_process(folder, "127.0.0.1:1", durability="sometimes") as process:
        assert await process.wait() == 1
