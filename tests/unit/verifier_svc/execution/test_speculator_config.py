"""VERIFIER_VLLM_SPECULATOR: what is read of it, and what is refused by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.errors import InvalidArgument
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.vllm.speculator_config import ELSEWHERE, METHODS, speculator_of

HEAD: dict[str, Any] = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}


def config(given: str, **changes: Any) -> VerifierConfig:
    return VerifierConfig(model="m", **({"engine": "vllm", "vllm_speculator": given} | changes))


def test_it_is_vllm_s_own_setting() -> None:
    assert speculator_of(config(json.dumps(HEAD))) == HEAD
    assert speculator_of(config("")) is None
    for method in METHODS:
        assert speculator_of(config(json.dumps(HEAD | {"method": method}))) is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("{", "is no JSON"),
        ("[]", "must be a JSON object"),
        (json.dumps(HEAD | {"method": "medusa"}), "'medusa': Model Runner V2 has no speculator for it"),
        (json.dumps({"method": "ngram", "num_speculative_tokens": 3}), "'ngram': lookups need no model"),
        (json.dumps(HEAD | {"method": "guess"}), "'guess': no such method is known"),
        (json.dumps({"model": "head", "num_speculative_tokens": 3}), "the method None"),
        (json.dumps(HEAD | {"rejection_sample_method": "block"}), "holds rejection_sample_method; what can be set"),
        (json.dumps(HEAD | {"num_speculative_tokens": 9}), "a number from 1 to 8"),
        (json.dumps(HEAD | {"num_speculative_tokens": 0}), "a number from 1 to 8"),
        (json.dumps(HEAD | {"num_speculative_tokens": True}), "a number from 1 to 8"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused_by_name(given: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match="VERIFIER_VLLM_SPECULATOR") as raised:
        speculator_of(config(given))
    assert named in raised.value.message


def test_the_embedded_engine_has_none() -> None:
    with pytest.raises(InvalidArgument, match="VERIFIER_VLLM_SPECULATOR needs VERIFIER_ENGINE=vllm"):
        config(json.dumps(HEAD), engine="embedded")


def test_every_other_method_of_vllm_has_its_reason() -> None:
    assert not set(METHODS) & set(ELSEWHERE) and all(ELSEWHERE.values())
