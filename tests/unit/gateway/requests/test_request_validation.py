"""Validation: what a request leaves open is decided once, and its record resolves to exactly the same again."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder
from tokenizers import models, processors

from gateway.auth.tenant import OPEN
from gateway.config import GatewayConfig
from gateway.requests import validation
from gateway.requests.resolved_request import ResolvedRequest
from gateway.requests.validation import RequestValidator, SessionCount
from gateway.routing.router import Router
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import FIELDS_CONFLICT, InvalidArgument, PermissionDenied, ResourceExhausted
from slipstream.v1 import gateway_pb2, types_pb2

CONFIG = GatewayConfig(verifiers=("x:1",), tokenizer="x", max_tokens_default=16, max_draft_tokens=6)
MODEL = types_pb2.ModelInfo(name="toy", vocabulary_size=50, max_length=100, eos_token_ids=[49, 48])


class OneModel(Router):
    def model(self, name: str) -> types_pb2.ModelInfo:
        return MODEL


def validator(config: GatewayConfig = CONFIG) -> RequestValidator:
    encoder = Encoder(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    encoder.post_processor = processors.TemplateProcessing(single="a $A", special_tokens=[("a", 0)])
    return RequestValidator(config, OneModel(), Tokenizer(encoder, 1000), random.Random(1).getrandbits)


async def resolve(request: gateway_pb2.GenerateRequest, config: GatewayConfig = CONFIG) -> ResolvedRequest:
    return await validator(config).resolve(request, OPEN)


def request(**fields: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(prompt_token_ids=gateway_pb2.TokenIds(token_ids=[1, 2, 3]), **fields)


async def test_defaults_are_the_servers() -> None:
    made = await resolve(request())
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.acceptance) == (1.0, 1.0, "coupled")
    assert (made.max_length, made.stop_token_ids, made.max_draft_tokens) == (19, (49, 48), 6)


@pytest.mark.parametrize(("default", "length"), [(0, 100), (16, 19), (1000, 100)])
async def test_without_max_tokens_the_output_has_what_the_models_length_leaves_up_to_the_operators_cap(
    default: int, length: int
) -> None:
    made = await resolve(request(), config=dataclasses.replace(CONFIG, max_tokens_default=default))
    assert made.max_length == length
    assert made.request.max_tokens == length - 3


async def test_a_default_output_is_shortened_to_what_can_be_sent_and_never_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validation, "MAX_ITEM_BYTES", validation.MOST_OTHER_BYTES + 60)
    rest = dataclasses.replace(CONFIG, max_tokens_default=0)
    predicted = gateway_pb2.Prediction(token_ids=gateway_pb2.TokenIds(token_ids=[7] * 10))
    assert (await resolve(request(prediction=predicted), config=rest)).max_length == 50
    with pytest.raises(InvalidArgument) as refused:
        await resolve(request(prediction=predicted, max_tokens=97), config=rest)
    assert refused.value.reason == "MESSAGE_TOO_LARGE"


@pytest.mark.parametrize("sent", [b"", b"\xf2\x01\x01x"])
async def test_a_structure_of_a_format_that_is_not_known_is_no_free_text(sent: bytes) -> None:
    """What a newer client sends: a format that this server has not heard of, which its message keeps as unknown."""
    with pytest.raises(InvalidArgument) as refused:
        await resolve(request(structured_output=types_pb2.StructuredOutput.FromString(sent)))
    assert refused.value.reason == "STRUCTURE_UNKNOWN"


@pytest.mark.parametrize(("asked", "given"), [(2, 2), (0, 0), (50, 6)])
async def test_a_request_may_ask_for_fewer_draft_tokens_but_not_for_more(asked: int, given: int) -> None:
    made = await resolve(request(speculation=gateway_pb2.SpeculationOptions(max_draft_tokens=asked)))
    assert made.max_draft_tokens == given


async def test_above_the_limit_of_sessions_nothing_is_planned() -> None:
    with pytest.raises(ResourceExhausted):
        validator().check_places(OPEN, SessionCount(CONFIG.max_sessions))


RULES = "max_tokens<8: off; workload=long max_tokens>=16: max_draft_tokens=50; any: max_draft_tokens=3"
WITH_RULES = dataclasses.replace(CONFIG, rules=RULES)
Speculation = gateway_pb2.SpeculationOptions


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({"max_tokens": 7}, 0),
        ({"max_tokens": 8}, 3),
        ({}, 3),  # the default is 16
        ({"workload": "long"}, 6),  # never above the gateway's own limit
        ({"workload": "long", "max_tokens": 15}, 3),
        ({"max_tokens": 7, "speculation": Speculation(max_draft_tokens=2)}, 2),
        ({"max_tokens": 8, "speculation": Speculation(max_draft_tokens=5)}, 5),
        ({"workload": "long", "speculation": Speculation(disabled=True)}, 0),
        ({"max_tokens": 8, "speculation": Speculation(disabled=True, max_draft_tokens=5)}, 0),
    ],
)
async def test_options_of_a_request_take_precedence_over_the_rules(asked: dict[str, Any], given: int) -> None:
    assert (await resolve(request(**asked), config=WITH_RULES)).max_draft_tokens == given


async def test_a_rule_sees_what_is_left_of_the_models_length() -> None:
    long_prompt = gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(token_ids=[1] * 95), max_tokens=1000
    )
    assert (await resolve(long_prompt, config=WITH_RULES)).max_draft_tokens == 0


async def test_a_prediction_is_tokenized_and_dropped_where_nothing_is_drafted() -> None:
    text, ids = (
        gateway_pb2.Prediction(text="b"),
        gateway_pb2.Prediction(token_ids=gateway_pb2.TokenIds(token_ids=[7, 49])),
    )
    assert (await resolve(request(prediction=text))).prediction == (1,)
    assert (await resolve(request(prediction=ids))).prediction == (7, 49)
    assert (await resolve(request(prediction=ids, speculation=Speculation(disabled=True)))).prediction == ()


async def test_only_a_prompt_begins_as_the_tokenizer_begins_a_text() -> None:
    assert (await resolve(gateway_pb2.GenerateRequest(prompt="b"))).prompt == (0, 1)
    change = gateway_pb2.RollbackRequest(output_tokens=2, text="b")
    nothing = gateway_pb2.GenerateRequest(), gateway_pb2.StoredRequest()
    assert (await validator().revise(*nothing, OPEN, [1, 2, 3], change))[1] == (1,)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"prediction": {"token_ids": {"token_ids": [1, 50]}}}, "TOKEN_OUT_OF_RANGE"),
        ({"prediction": {"token_ids": {"token_ids": [1] * 101}}}, "PREDICTION_TOO_LONG"),
        ({"prediction": {"text": "x" * 1001}}, "TEXT_TOO_LONG"),
        ({"workload": "é" * 33}, "LABEL_TOO_LONG"),
        ({"cache_salt": "x" * 65}, "LABEL_TOO_LONG"),
        ({"annotation": b"x" * (16_384 + 4 * 3 + 1)}, "LABEL_TOO_LONG"),
    ],
)
@pytest.mark.parametrize("disabled", [False, True])
async def test_hints_that_cannot_be_right_are_refused(asked: dict[str, Any], reason: str, disabled: bool) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await resolve(request(**asked, speculation=Speculation(disabled=disabled)))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"sampling": {"allowed_token_ids": [3, 50]}}, "allowed_token_ids holds token 50"),
        ({"sampling": {"allowed_token_ids": [3] * 1025}}, "more than 1024"),
        ({"sampling": {"allowed_token_ids": [3]}, "structured_output": {"json_object": True}}, "exclude each other"),
        ({"sampling": {"allowed_token_ids": [49, 3]}, "min_tokens": 1, "stop_token_ids": [3]}, "tokens alone"),
        ({"sampling": {"bad_words_ids": [{"token_ids": [3, 50]}]}}, "bad_words_ids holds token 50"),
        ({"sampling": {"bad_words_ids": [{"token_ids": [3] * 1025}]}}, "more than 1024"),
        ({"sampling": {"bad_words_ids": [{}]}}, "without tokens"),
        ({"sampling": {"bad_words_ids": [{"token_ids": [each]} for each in range(50)]}}, "no token"),
        ({"sampling": {"bad_words_ids": [{"token_ids": [4, 3]}], "allowed_token_ids": [3]}}, "tokens alone"),
        ({"bad_words": ["a"] * 257}, "more than 256"),
        ({"bad_words": ["a" * 8193]}, "8193 bytes"),
        ({"bad_words": ["a", " "]}, "is empty"),
        ({"bad_words": ["a"], "structured_output": {"json_object": True}}, "exclude each other"),
        ({"reasoning_limit": {"begin_token_id": 4, "end_token_id": 4}}, "one token as both"),
        ({"reasoning_limit": {"begin_token_id": 4, "end_token_id": 50}}, "holds token 50"),
        ({"reasoning_limit": {"end_token_id": 5}, "sampling": {"allowed_token_ids": [3]}}, "that ends reasoning"),
        ({"reasoning_limit": {"end_token_id": 5}, "structured_output": {"json_object": True}}, "exclude each other"),
    ],
)
async def test_an_output_that_no_token_may_begin_is_refused(asked: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidArgument, match=fault):
        await resolve(request(**asked))
    assert (await resolve(request(sampling={"allowed_token_ids": [49, 3]}, min_tokens=1))).request.min_tokens == 1


TOKENS = st.lists(st.integers(0, 49), max_size=4)
SAMPLINGS = st.builds(
    gateway_pb2.SamplingOptions,
    temperature=st.none() | st.just(0.0) | st.floats(1e-38, 100),
    top_k=st.none() | st.integers(0, 2**32 - 1),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(1e-30, 100),
    presence_penalty=st.none() | st.floats(-2, 2),
    frequency_penalty=st.none() | st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    allowed_token_ids=TOKENS,
    bad_words_ids=st.lists(
        st.builds(gateway_pb2.TokenIds, token_ids=st.lists(st.integers(0, 20), min_size=1)), max_size=2
    ),
)
SPECULATIONS = st.builds(
    gateway_pb2.SpeculationOptions, disabled=st.booleans(), max_draft_tokens=st.none() | st.integers(0, 100)
)


@given(
    sampling=SAMPLINGS,
    speculation=SPECULATIONS,
    max_tokens=st.none() | st.integers(1, 2**32 - 1),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 49), max_size=4),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    show_special_tokens=st.booleans(),
    logged=st.none() | st.integers(0, 20),
    workload=st.text(max_size=16),
    cache_salt=st.text(max_size=16),
    prediction=st.none()
    | st.builds(gateway_pb2.Prediction, text=st.sampled_from(["", "a", "b"]))
    | st.builds(gateway_pb2.Prediction, token_ids=st.builds(gateway_pb2.TokenIds, token_ids=TOKENS)),
)
async def test_the_record_asks_for_exactly_the_same_again(**fields: Any) -> None:
    if (logged := fields.pop("logged")) is not None:
        fields |= {"logprobs": True, "top_logprobs": logged}
    try:
        made = await resolve(request(**fields))
    except InvalidArgument as refused:
        assume(refused.reason != FIELDS_CONFLICT)  # no token may be left beside bad words and stop tokens
        raise
    assert made.top_logprobs == logged
    stored = gateway_pb2.GenerateRequest.FromString(made.params())
    assert await validator().resolve(stored, OPEN, prompt=made.prompt) == made


async def test_only_an_operator_may_raise_the_priority_of_a_request() -> None:
    assert (await resolve(request(priority=3))).request.priority == 3
    with pytest.raises(PermissionDenied) as caught:
        await resolve(request(priority=-1))
    assert caught.value.reason == "PRIORITY"


async def test_a_session_that_could_outgrow_a_message_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All its tokens count: prompt, the most output, and prediction."""
    monkeypatch.setattr(validation, "MAX_ITEM_BYTES", validation.MOST_OTHER_BYTES + 40)
    prediction = gateway_pb2.Prediction(token_ids=gateway_pb2.TokenIds(token_ids=[1] * 20))
    assert (await resolve(request(max_tokens=17, prediction=prediction))).max_length == 20
    for larger in (request(max_tokens=18, prediction=prediction), request(max_tokens=38)):
        with pytest.raises(InvalidArgument) as refused:
            await resolve(larger)
        assert refused.value.reason == "MESSAGE_TOO_LARGE"


@pytest.mark.parametrize("size", [2, 128, 129, 16_384, 16_385, 262_144])
def test_no_id_of_a_vocabulary_takes_more_bytes_than_are_counted(size: int) -> None:
    one = types_pb2.Prefix(token_ids=[size - 1])
    many = types_pb2.Prefix(token_ids=[size - 1] * 2)
    assert many.ByteSize() - one.ByteSize() == validation._token_bytes(size)
