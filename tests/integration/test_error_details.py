"""What an error carries for programs: a reason of its kind, the field, the numbers of its sentence."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gateway.text.chat_messages import MAX_MESSAGES
from slipstream.errors import Aborted, InvalidArgument, NotFound, OutOfRange, SlipstreamError
from slipstream.rpc.channel import CHANNEL_OPTIONS, error_of
from slipstream.v1 import gateway_pb2, types_pb2
from tests.support.scripted_gateway import Setting

SCHEMA = {"structured_output": types_pb2.StructuredOutput(regex="a+")}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": types_pb2.SamplingOptions(**fields)}


def many(count: int) -> list[gateway_pb2.ChatMessage]:
    return [gateway_pb2.ChatMessage(role="user", content="a")] * count


REFUSED: list[tuple[dict[str, Any], str, str, dict[str, float]]] = [
    (sampling(temperature=-1.0), "NUMBER_OUT_OF_RANGE", "sampling.temperature", {"least": 0, "most": 100}),
    (sampling(top_p=1.5), "NUMBER_OUT_OF_RANGE", "sampling.top_p", {"least": 0, "most": 1}),
    (sampling(presence_penalty=3.0), "NUMBER_OUT_OF_RANGE", "sampling.presence_penalty", {"least": -2, "most": 2}),
    (sampling(logit_bias={5: 101.0}), "NUMBER_OUT_OF_RANGE", "sampling.logit_bias[5]", {"least": -100, "most": 100}),
    (
        sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "TOO_MANY_ITEMS",
        "sampling.logit_bias",
        {"items": 1025, "limit": 1024},
    ),
    (sampling(acceptance=77), "VALUE_UNKNOWN", "sampling.acceptance", {}),
    (sampling(allowed_token_ids=[5]) | SCHEMA, "FIELDS_CONFLICT", "sampling.allowed_token_ids", {}),
    ({"max_tokens": 0}, "NO_TOKENS", "max_tokens", {}),
    ({"prompt": ""}, "EMPTY_PROMPT", "prompt", {}),
    ({"stop": ["a"] * 17}, "TOO_MANY_ITEMS", "stop", {"items": 17, "limit": 16}),
    ({"stop": [""]}, "STOP_STRING", "stop", {"least": 1, "most": 1024}),
    ({"stop_token_ids": range(65)}, "TOO_MANY_ITEMS", "stop_token_ids", {"items": 65, "limit": 64}),
    ({"top_logprobs": 21, "logprobs": True}, "NUMBER_OUT_OF_RANGE", "top_logprobs", {"least": 0, "most": 20}),
    ({"top_logprobs": 1}, "FIELD_MISSING", "logprobs", {}),
    ({"min_tokens": 41}, "NUMBER_OUT_OF_RANGE", "min_tokens", {"least": 0, "most": 40}),
    ({"workload": "x" * 65}, "LABEL_TOO_LONG", "workload", {"bytes": 65, "limit": 64}),
    ({"model": "x" * 257}, "LABEL_TOO_LONG", "model", {"characters": 257, "limit": 256}),
    ({"speculation": {"drafters": ["a"] * 65}}, "TOO_MANY_ITEMS", "speculation.drafters", {"items": 65, "limit": 64}),
    ({"structured_output": {}}, "STRUCTURE_UNKNOWN", "structured_output", {}),
    ({"structured_output": {"json_schema": '{"uniqueItems": 1}'}}, "BAD_GRAMMAR", "structured_output", {}),
    ({"structured_output": {"grammar": "root ::= x"}}, "BAD_GRAMMAR", "structured_output", {}),
    ({"bad_words": [""]}, "NO_TOKENS", "bad_words", {}),
    ({"bad_words": ["a" * 8193]}, "TEXT_TOO_LONG", "bad_words", {"bytes": 8193, "limit": 8192}),
    (sampling(bad_words_ids=[{}]), "NO_TOKENS", "sampling.bad_words_ids", {}),
    ({"reasoning_limit": {"end_token_id": 0}}, "FIELD_INVALID", "reasoning_limit", {}),
    ({"ignore_eos": True} | SCHEMA, "ENDLESS_GRAMMAR", "ignore_eos", {}),
    (
        {"prompt": "", "chat": gateway_pb2.Chat(messages=many(MAX_MESSAGES + 1))},
        "TOO_MANY_ITEMS",
        "chat.messages",
        {"items": MAX_MESSAGES + 1, "limit": MAX_MESSAGES},
    ),
]


async def refused(setting: Setting, request: dict[str, Any]) -> SlipstreamError:
    front = await setting.front(setting.verifier())
    with pytest.raises(SlipstreamError) as caught:
        await front.generate(**request)
    return caught.value


@pytest.mark.parametrize(("request_", "reason", "field", "numbers"), REFUSED)
async def test_each_kind_of_wrong_request_has_a_reason_a_field_and_numbers(
    setting: Setting, request_: dict[str, Any], reason: str, field: str, numbers: dict[str, float]
) -> None:
    error = await refused(setting, request_)
    assert isinstance(error, InvalidArgument)
    assert (error.reason, error.field, dict(error.numbers)) == (reason, field, numbers)


async def test_a_prompt_that_is_too_long_is_refused_with_its_length_and_the_limit(setting: Setting) -> None:
    most = setting.model.max_length - 1
    error = await refused(setting, {"prompt_token_ids": {"token_ids": [5] * (most + 9)}})
    assert (error.reason, error.field, dict(error.numbers)) == (
        "PROMPT_TOO_LONG",
        "prompt",
        {"tokens": most + 9, "limit": most},
    )


async def test_a_token_of_another_vocabulary_is_named_with_its_field(setting: Setting) -> None:
    size = setting.model.vocabulary_size
    error = await refused(setting, sampling(logit_bias={size: 1.0}))
    assert (error.reason, error.field) == ("TOKEN_OUT_OF_RANGE", "sampling.logit_bias")
    assert error.numbers == {"token": size, "most": size - 1}


async def test_an_unknown_model_or_drafter_is_refused_with_its_field(setting: Setting) -> None:
    for request, reason, field in (
        ({"model": "other"}, "NO_MODEL", "model"),
        ({"speculation": {"drafters": ["other"]}}, "NO_DRAFTER", "speculation.drafters"),
    ):
        error = await refused(setting, request)
        assert isinstance(error, NotFound) and (error.reason, error.field) == (reason, field)


async def test_the_violation_repeats_the_sentence_for_a_form(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    with pytest.raises(grpc.RpcError) as caught:
        await front.call(**sampling(min_p=2.0)).read()
    status = rpc_status.from_call(caught.value)
    wrong = error_details_pb2.BadRequest()
    assert [detail.Unpack(wrong) for detail in status.details] == [False, True]
    (violation,) = wrong.field_violations
    assert violation.field == "sampling.min_p" and violation.description == status.message


async def test_a_request_above_the_size_limit_is_refused_with_the_limit(setting: Setting) -> None:
    front = await setting.front(setting.verifier(), max_prompt_bytes=1000)
    limit = 2 * 1000 + (1 << 20)
    line = grpc.aio.insecure_channel(front.gateway.address, options=CHANNEL_OPTIONS)
    for size, reason in ((limit + 10_000, "MESSAGE_TOO_LARGE"), (limit + (1 << 20) + 10, "RESOURCE_EXHAUSTED")):
        with pytest.raises(grpc.RpcError) as caught:
            await line.unary_unary(
                "/slipstream.v1.GatewayService/Tokenize", gateway_pb2.TokenizeRequest.SerializeToString
            )(gateway_pb2.TokenizeRequest(text="x" * size))
        error = error_of(caught.value)
        assert error.reason == reason
        if reason == "MESSAGE_TOO_LARGE":
            assert isinstance(error, InvalidArgument) and error.numbers["limit"] == limit < error.numbers["bytes"]
    await line.close()


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_method_that_is_not_served_has_a_reason_too(setting: Setting, kind: str) -> None:
    front = await setting.front(setting.verifier())
    line = grpc.aio.insecure_channel(front.gateway.address)
    call = getattr(line, kind)("/slipstream.v1.GatewayService/Dream")
    made = call(iter([b""]) if kind.startswith("stream") else b"")
    with pytest.raises(grpc.RpcError) as caught:
        await (made if kind.endswith("unary") else made.read())
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED and status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("UNKNOWN_METHOD", "slipstream")
    await line.close()


async def test_resuming_a_revision_that_was_rolled_back_is_refused_with_the_present_revision(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    answer = await front.generate(max_tokens=12)
    session = answer.started.session_id
    assert (await front.record(session)).revision == answer.started.revision == 0
    rolled = await front.roll_back(session, 5)
    assert (await front.record(session)).revision == rolled.revision == 1
    with pytest.raises(Aborted) as gone:
        await front.resume(session, answer, revision=0)
    assert (gone.value.reason, dict(gone.value.numbers)) == ("ROLLED_BACK", {"revision": 1})


async def test_rolling_back_a_running_text_ends_its_stream_with_the_number_of_tokens_left(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9))
    call = front.call(max_tokens=200)
    session, seen = "", 0
    with pytest.raises(grpc.RpcError) as caught:
        async for event in call:
            session = session or event.started.session_id
            seen += len(event.delta.token_ids)
            if seen == 9:  # where the verifier stands still
                await front.roll_back(session, 4)
    error = error_of(caught.value)
    assert error.reason == "ROLLED_BACK" and dict(error.numbers) == {"revision": 1, "output_tokens": 4}


async def test_a_revision_that_never_was_is_not_a_rollback(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    answer = await front.generate(max_tokens=6)
    with pytest.raises(OutOfRange) as wrong:
        await front.resume(answer.started.session_id, answer, revision=3)
    assert (wrong.value.reason, wrong.value.field) == ("NO_REVISION", "revision")
    assert wrong.value.numbers == {"revision": 0}


async def test_offsets_beyond_the_text_are_refused_with_its_length(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    answer = await front.generate(max_tokens=6)
    session, length = answer.started.session_id, len(answer.tokens)
    for asked, field, numbers in (
        ({"offset": length + 5}, "offset", {"output_tokens": length}),
        ({"offset": length, "characters": 900}, "characters", {"characters": len(answer.text)}),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in front.stub.Resume(gateway_pb2.ResumeRequest(session_id=session, **asked)):
                pass
        error = error_of(caught.value)
        assert (error.reason, error.field, dict(error.numbers)) == ("NO_OFFSET", field, numbers)
    with pytest.raises(OutOfRange) as kept:
        await front.roll_back(session, length + 1)
    assert kept.value.field == "output_tokens" and kept.value.numbers == {"output_tokens": length}
