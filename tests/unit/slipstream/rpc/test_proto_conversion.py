"""Messages and the project's own types are the same, both ways."""

from __future__ import annotations

import math
from dataclasses import fields

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.factory import open_engine
from slipstream.errors import Internal, InvalidArgument, ResourceExhausted, SlipstreamError, Unavailable
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import error_of
from slipstream.speculation.sampling_params import ACCEPTANCE_RULES, SamplingParams
from slipstream.v1 import types_pb2, verifier_pb2

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(1e-38, 100),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-30, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=5),
    seed=st.integers(0, 2**64 - 1),
    acceptance=st.sampled_from(ACCEPTANCE_RULES),
    allowed_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
    bad_words_ids=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4).map(tuple), max_size=3).map(
        tuple
    ),
)


@given(SAMPLINGS)
def test_sampling_survives_the_wire(sampling: SamplingParams) -> None:
    message = types_pb2.SamplingOptions.FromString(proto_conversion.sampling_to_proto(sampling).SerializeToString())
    assert proto_conversion.sampling_from_proto(message) == sampling


def test_the_parameters_of_a_session_have_the_names_of_their_fields() -> None:
    assert tuple(field.name for field in fields(SamplingParams)) == proto_conversion.SAMPLING_FIELDS


def test_a_zero_that_an_earlier_gateway_left_out_is_zero_to_a_worker() -> None:
    """Its message had no presence: temperature 0 was not written."""
    written = bytes.fromhex("19000000000000f03f29000000000000f03f5001")  # top_p 1, repetition_penalty 1, coupled
    message = types_pb2.SamplingOptions.FromString(written)
    assert proto_conversion.sampling_from_proto(message) == SamplingParams(temperature=0.0, seed=0)
    assert proto_conversion.sampling_of_client(message, lambda: 7) == SamplingParams(temperature=1.0, seed=7)
    assert proto_conversion.sampling_to_proto(SamplingParams(temperature=0.0)).HasField("temperature")


def test_the_servers_default_rule_is_coupled() -> None:
    assert proto_conversion.rule_name(types_pb2.ACCEPTANCE_RULE_UNSPECIFIED) == "coupled"


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -3.0])
def test_a_worker_refuses_numbers_out_of_range(field: str, value: float) -> None:
    message = proto_conversion.sampling_to_proto(SamplingParams())
    setattr(message, field, value)
    with pytest.raises(InvalidArgument, match=field):
        proto_conversion.sampling_from_proto(message)


def test_an_unknown_rule_is_refused_by_number_and_by_name() -> None:
    message = types_pb2.SamplingOptions.FromString(
        types_pb2.SamplingOptions(top_p=1, repetition_penalty=1).SerializeToString() + b"\x50\x63"
    )
    with pytest.raises(InvalidArgument, match="99"):
        proto_conversion.sampling_from_proto(message)
    with pytest.raises(InvalidArgument, match="lucky"):
        proto_conversion.rule_number("lucky")


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_rules_have_one_number_each(rule: str) -> None:
    assert proto_conversion.rule_name(proto_conversion.rule_number(rule)) == rule


@pytest.mark.parametrize("name", ["block", "recursive"])
def test_former_rules_are_other_names_of_rejection(name: str) -> None:
    former = types_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{name.upper()}")
    assert proto_conversion.rule_name(former) == "rejection" == SamplingParams(acceptance=name).acceptance
    assert proto_conversion.rule_number(name) == types_pb2.ACCEPTANCE_RULE_REJECTION
    message = types_pb2.SamplingOptions(temperature=1.0, top_p=1.0, repetition_penalty=1.0, acceptance=former)
    assert proto_conversion.sampling_from_proto(message) == SamplingParams(acceptance="rejection")


@pytest.mark.parametrize("kind", SlipstreamError.__subclasses__())
def test_failures_keep_their_type_sentence_and_reason(kind: type[SlipstreamError]) -> None:
    back = proto_conversion.failure_from_proto(proto_conversion.failure_to_proto(kind("Try again.", reason="WORD")))
    assert (type(back), back.message, back.reason) == (kind, "Try again.", "WORD")


@pytest.mark.parametrize("code", [-1, 0, 1, 99])
def test_a_failure_with_a_strange_code_is_internal(code: int) -> None:
    assert type(proto_conversion.failure_from_proto(types_pb2.Failure(code=code))) is Internal


def test_a_peers_endless_sentence_is_not_passed_on() -> None:
    error = proto_conversion.failure_from_proto(
        types_pb2.Failure(code=8, message="x" * 3_000_000, reason="y" * 3_000_000)
    )
    assert isinstance(error, ResourceExhausted)
    assert proto_conversion.failure_to_proto(error).ByteSize() < 2000


def test_a_models_card_reaches_the_other_side() -> None:
    model = open_engine("emulated:vocabulary=77").model
    message = proto_conversion.model_to_proto(model)
    assert (message.vocabulary_size, message.vocabulary_fingerprint) == (77, model.fingerprint)
    assert message.max_length == model.max_length


# A failed call's status is a peer's word too.


def failed_call(code: grpc.StatusCode, details: bytes) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "away")


@pytest.mark.parametrize(
    "details",
    [
        b"\xff\xff\xff",
        status_pb2.Status(code=3, message="something else").SerializeToString(),
        status_pb2.Status(
            code=14,
            message="away",
            details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")],
        ).SerializeToString(),
    ],
    ids=["no protobuf", "another status", "garbage inside"],
)
def test_status_details_of_a_lying_peer_are_ignored(details: bytes) -> None:
    error = error_of(failed_call(grpc.StatusCode.UNAVAILABLE, details))
    assert isinstance(error, Unavailable)
    assert error.message == "away"


@given(st.lists(st.floats(-math.inf, 1.0)))
def test_a_confidence_survives_in_one_byte_up_to_half_a_step(log_probs: list[float]) -> None:
    read = proto_conversion.confidences_from_proto(proto_conversion.confidences_to_proto(log_probs))
    assert len(read) == len(log_probs)
    for log_prob, value in zip(log_probs, read, strict=True):
        assert abs(value - min(0.0, max(log_prob, -255 / 32))) <= 0.5 / 32


def test_a_failure_sent_by_a_peer_is_one_line_in_a_log() -> None:
    told = types_pb2.Failure(
        code=9, message="no\r\n2026 ERROR forged\x1b[2J \N{GREEK SMALL LETTER ALPHA}", reason="A\nB"
    )
    error = proto_conversion.failure_from_proto(told)
    assert (error.message, error.reason) == ("no  2026 ERROR forged [2J \N{GREEK SMALL LETTER ALPHA}", "A B")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, 0), (1.5, 1_500_000), (4294.0, 4_294_000_000), (4300.0, 2**32 - 1)]
)
def test_a_long_time_fits_its_field(seconds: float, told: int) -> None:
    assert proto_conversion.microseconds(seconds) == told == verifier_pb2.Round(wait_us=told).wait_us
