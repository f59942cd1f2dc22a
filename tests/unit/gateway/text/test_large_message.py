"""A large request of gRPC that is taken apart and put together asks for what it asked for, and is small on the way."""

from __future__ import annotations

import pytest

from gateway.text.large_message import MOST_ITEMS, put_together, take_apart
from slipstream.errors import NOT_PROTOBUF, TOO_MANY_ITEMS, InvalidArgument
from slipstream.v1 import gateway_pb2, types_pb2

IDS = gateway_pb2.TokenIds(token_ids=[0, 1, 2**32 - 1])
CHAT = gateway_pb2.Chat(
    messages=[gateway_pb2.ChatMessage(role="user", content="Hi")] * 3,
    template_variables_json='{"continue_final_message": true}',
)
OTHERS = gateway_pb2.GenerateRequest(
    model="m", max_tokens=0, stop=["x"], annotation=b"y", sampling=gateway_pb2.SamplingOptions(seed=3)
)


def least(chat: gateway_pb2.Chat) -> int:
    return 7 * len(chat.messages)


def asked(**more: object) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(**more)  # type: ignore[arg-type]
    request.MergeFrom(OTHERS)
    return request


def test_a_conversation_and_token_ids_are_taken_out_and_nothing_else_changes() -> None:
    request = asked(chat=CHAT, prediction=gateway_pb2.Prediction(token_ids=IDS))
    large = put_together(take_apart(request.SerializeToString(), least, 3))
    assert large.rest == OTHERS and gateway_pb2.Chat.FromString(large.chat) == CHAT
    assert (large.least, large.goes_on, large.counts) == (21, True, {"prediction": 3})
    assert list(large.prediction) == list(IDS.token_ids) and not large.prompt
    request = asked(prompt_token_ids=IDS)
    large = put_together(take_apart(request.SerializeToString(), least, 3))
    assert large.rest == OTHERS and list(large.prompt) == list(IDS.token_ids) and large.counts == {"prompt": 3}


def test_texts_are_left_in_the_message() -> None:
    request = asked(prompt="x" * 100_000, prediction=gateway_pb2.Prediction(text="y"))
    large = put_together(take_apart(request.SerializeToString(), least, 3))
    assert large.rest == request and not large.counts and not large.chat


def test_more_token_ids_than_any_model_takes_are_returned_as_a_count() -> None:
    request = asked(prompt_token_ids=IDS)
    large = put_together(take_apart(request.SerializeToString(), least, 2))
    assert large.counts == {"prompt": 3} and not large.prompt


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"stop": ["x"] * MOST_ITEMS}, "stop"),
        ({"stop_token_ids": [1] * (MOST_ITEMS + 1)}, "stop_token_ids"),
        (
            {"sampling": gateway_pb2.SamplingOptions(logit_bias=dict.fromkeys(range(MOST_ITEMS + 1), 1.0))},
            "sampling.logit_bias",
        ),
        ({"speculation": gateway_pb2.SpeculationOptions(drafters=["x"] * (MOST_ITEMS + 1))}, "speculation.drafters"),
        ({"chat": gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage()] * 10_001)}, "chat.messages"),
    ],
)
def test_very_long_lists_are_refused(more: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        take_apart(asked(**more).SerializeToString(), least, 3)
    assert (refused.value.reason, refused.value.field) == (TOO_MANY_ITEMS, field)


def test_lists_of_allowed_length_are_kept_as_they_are() -> None:
    sampling = gateway_pb2.SamplingOptions(logit_bias=dict.fromkeys(range(1024), 1.0))
    structure = types_pb2.StructuredOutput(json_schema="{}")
    request = gateway_pb2.GenerateRequest(prompt="x", sampling=sampling, structured_output=structure)
    assert put_together(take_apart(request.SerializeToString(), least, 3)).rest == request


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        take_apart(b"\xff\xff\xff", least, 3)
    assert refused.value.reason == NOT_PROTOBUF
