"""A drafter that runs inside the verifiers needs no channel and is always there."""

from __future__ import annotations

from gateway.routing.drafters import DrafterWorker
from slipstream.v1 import types_pb2

TARGET = types_pb2.ModelInfo(name="target", vocabulary_size=9, vocabulary_fingerprint="f")


def test_a_drafter_inside_the_verifiers_is_present_with_the_method_of_its_address() -> None:
    drafter = DrafterWorker("lookup", "verifier:ngram", True, None, lambda: None)
    assert drafter.present and not drafter.draining and drafter.method == "ngram"
    assert drafter.mismatch(TARGET) == "" == drafter.as_served(TARGET).mismatch
    assert drafter.as_address().address == "verifier:ngram"
    assert drafter.holds(10**6)
