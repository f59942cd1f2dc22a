"""A gateway refuses settings it cannot keep, with a sentence that names them."""

from __future__ import annotations

import pytest

from gateway.config import GatewayConfig
from slipstream.config import from_env
from slipstream.errors import InvalidArgument

NEEDED = {"GATEWAY_VERIFIERS": "a:1, b:2", "GATEWAY_TOKENIZER": "models/target"}


def test_lists_are_split_and_defaults_kept() -> None:
    config = from_env(GatewayConfig, "GATEWAY_", NEEDED | {"GATEWAY_DRAFTERS": "model=c:3,ngram=d:4"})
    assert config.verifiers == ("a:1", "b:2")
    assert config.drafters == ("model=c:3", "ngram=d:4")
    assert (config.store, config.durability) == ("memory", "strict")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERIFIERS", ""),
        ("DURABILITY", "sometimes"),
        ("STORE", "localhost:6379"),
        ("STORE", "redis+sentinel://localhost"),
        ("STORE_REPLICAS", "1"),
        ("LEASE_S", "0"),
        ("LEASE_S", "7200"),
        ("VERIFIERS", "dns:///verifier"),
        ("DRAFTERS", "c:3"),
        ("DRAFTERS", "model=dns:///c"),
        ("DRAFTERS", "model@1=c:3"),
        ("DISCOVERY_S", "0"),
        ("TRUSTED_DRAFTERS", "ngram"),
        ("MAX_TOKENS_DEFAULT", "many"),
        ("CREDIT_TOKENS", "0"),
        ("RULES", "any: drafters=nobody"),
        ("RULES", "any off"),
        ("RULES", "key=alice: off"),  # and no keys
        ("COLOUR", "red"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=name.lower() + "|" + name):
        from_env(GatewayConfig, "GATEWAY_", NEEDED | {f"GATEWAY_{name}": value})


POSITIVE = ("DISCOVERY_S", "STALL_S", "STORE_GRACE_S", "REHOMING_WAIT_S", "BREAKER_WINDOW_S", "BREAKER_COOL_DOWN_S")
COUNTS = (
    "REHOMINGS",
    "MAX_DRAFT_TOKENS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_BYTES",
    "MAX_STOP_TOKENS",
    "STORE_REPLICAS",
    "MAX_TOKENS_DEFAULT",
)
SPANS = ("GRACE_S", "SLO_TTFT_S", "SLO_TPOT_S", "SLOW_REQUEST_S", "VERIFIER_PRICE")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in POSITIVE for value in ("0", "-1", "nan")),
        *((name, "0") for name in ("MAX_PROMPT_BYTES", "MAX_SESSIONS", "CREDIT_TOKENS")),
        *((name, "-1") for name in (*COUNTS, *SPANS, "FAILED_KEYS_PER_MINUTE")),
        *((name, "nan") for name in SPANS),
        ("SESSION_TTL_S", "inf"),
    ],
)
def test_numbers_with_which_nothing_could_be_served_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"GATEWAY_{name}"):
        from_env(GatewayConfig, "GATEWAY_", NEEDED | {f"GATEWAY_{name}": value})


@pytest.mark.parametrize("name", [*COUNTS, *SPANS])
def test_limits_may_be_set_to_zero(name: str) -> None:
    config = from_env(GatewayConfig, "GATEWAY_", NEEDED | {f"GATEWAY_{name}": "0"})
    assert getattr(config, name.lower()) == 0
