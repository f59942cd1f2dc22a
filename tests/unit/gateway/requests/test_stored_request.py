"""What a store keeps of a request: records of earlier gateways are read, and clients cannot write its own fields."""

from __future__ import annotations

from dataclasses import replace

from gateway.auth.tenant import Tenant, TenantLimits
from gateway.requests.resolved_request import ResolvedRequest
from gateway.sessions.arithmetic_spans import WrittenSpan, same_request, with_spans
from slipstream.v1 import gateway_pb2
from tests.unit.gateway.requests.test_request_validation import resolve, validator

ASKED = gateway_pb2.GenerateRequest(
    prompt="a",
    sampling=gateway_pb2.SamplingOptions(temperature=0.5, top_k=7, seed=2**64 - 1, logit_bias={5: -1.5}),
    max_tokens=16,
    stop=["END"],
    speculation=gateway_pb2.SpeculationOptions(max_draft_tokens=4, drafters=["ngram"]),
    workload="code",
    cache_salt="mine",
    priority=3,
    prediction=gateway_pb2.Prediction(token_ids=gateway_pb2.TokenIds(token_ids=[7, 8])),
    logprobs=True,
    top_logprobs=2,
)


async def resolved() -> ResolvedRequest:
    made = await validator().resolve(ASKED, Tenant("alice", TenantLimits()), prompt=(1, 2, 3))
    return replace(made, revision=2, vocabulary="fingerprint")


WRITTEN_BEFORE = bytes.fromhex(
    "0a03746f79223709000000000000e03f100719000000000000f03f29000000000000f03f420b080511000000000000f8bf48ffffffffffff"
    "ffffff01500128103203454e443a02313040014a0910041a056e6772616d5204636f64655a046d696e65620612040a020708680678018001"
    "02a20605616c696365a80602b2060b66696e6765727072696e74"
)
"""The same request as a gateway stored it that kept a GenerateRequest."""


async def test_a_record_of_an_earlier_gateway_is_byte_for_byte_one_of_today() -> None:
    assert (await resolved()).params() == WRITTEN_BEFORE
    asked = gateway_pb2.GenerateRequest.FromString(WRITTEN_BEFORE)
    stored = gateway_pb2.StoredRequest.FromString(WRITTEN_BEFORE)
    assert (asked.model, asked.sampling.seed, asked.max_tokens, list(asked.stop)) == ("toy", 2**64 - 1, 16, ["END"])
    assert (list(asked.stop_token_ids), asked.ignore_eos) == ([49, 48], True)
    assert (stored.owner, stored.revision, stored.vocabulary_fingerprint) == ("alice", 2, "fingerprint")
    assert asked.speculation.drafters == ["ngram"] and asked.prediction.token_ids.token_ids == [7, 8]


async def test_record_fields_written_later_leave_the_stored_request_unchanged() -> None:
    """Also one of a later release: the other message's fields are kept as they came."""
    moved = with_spans(WRITTEN_BEFORE + b"\x98\x06\x05", [WrittenSpan("one", 3)], moves=2)  # field 99
    stored = gateway_pb2.StoredRequest.FromString(moved)
    assert (stored.owner, stored.moves, stored.arithmetics[0].offset) == ("alice", 2, 3)
    asked = gateway_pb2.GenerateRequest.FromString(moved)
    asked.DiscardUnknownFields()
    assert asked == (await resolved()).request
    assert b"\x98\x06\x05" in moved and same_request(moved, WRITTEN_BEFORE + b"\x98\x06\x05")


async def test_record_fields_sent_by_a_client_are_ignored() -> None:
    claims = gateway_pb2.StoredRequest(owner="bob", revision=7, vocabulary_fingerprint="theirs").SerializeToString()
    asked = gateway_pb2.GenerateRequest(prompt_token_ids=gateway_pb2.TokenIds(token_ids=[1, 2, 3]))
    asked = gateway_pb2.GenerateRequest.FromString(asked.SerializeToString() + claims)
    stored = gateway_pb2.StoredRequest.FromString((await resolve(asked)).params())
    assert (stored.owner, stored.revision) == ("", 0) and stored.vocabulary_fingerprint not in ("", "theirs")
