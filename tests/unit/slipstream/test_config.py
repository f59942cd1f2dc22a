"""Configuration from the environment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from drafter_svc.config import DrafterConfig
from slipstream.config import from_env
from slipstream.errors import InvalidArgument
from verifier_svc.config import VerifierConfig


@dataclass(frozen=True)
class Settings:
    model: str
    threads: int = 1
    wait_s: float = 0.5
    strict: bool = False
    peers: tuple[str, ...] = ()


def read(**variables: str) -> Settings:
    return from_env(Settings, "TOY_", {"PATH": "/bin", **{f"TOY_{name}": text for name, text in variables.items()}})


def test_every_kind_of_field_is_read() -> None:
    settings = read(MODEL="m", THREADS=" 4 ", WAIT_S="0.25", STRICT="Yes", PEERS="a:1, b:2,,")
    assert settings == Settings("m", 4, 0.25, True, ("a:1", "b:2"))


def test_defaults_stand_where_nothing_is_set() -> None:
    assert read(MODEL="m") == Settings("m")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("0", False), ("FALSE", False), ("no", False)]
)
def test_booleans_have_words(text: str, value: bool) -> None:
    assert read(MODEL="m", STRICT=text).strict is value


def test_a_missing_required_setting_is_named() -> None:
    with pytest.raises(InvalidArgument, match="TOY_MODEL"):
        read(THREADS="2")


def test_an_unknown_setting_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"TOY_THREAD.*TOY_THREADS"):
        read(MODEL="m", THREAD="2")


@pytest.mark.parametrize(
    ("name", "text"), [("THREADS", "many"), ("THREADS", "1.5"), ("WAIT_S", ""), ("STRICT", "perhaps")]
)
def test_a_value_that_cannot_be_read_is_named_with_its_variable(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(MODEL="m", **{name: text})
    assert f"TOY_{name}={text!r}" in caught.value.message


def test_variables_of_other_prefixes_are_ignored() -> None:
    assert from_env(Settings, "TOY_", {"TOY_MODEL": "m", "TOYS_MODEL": "n", "MODEL": "o"}).model == "m"


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_MODEL", "from the process")
    assert from_env(Settings, "TOY_").model == "from the process"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (VerifierConfig, "VERIFIER_STEP_TOKENS", 0),
        (VerifierConfig, "VERIFIER_SILENCE_S", math.nan),
        (VerifierConfig, "VERIFIER_MAX_DRAFT_TOKENS", -1),
        (VerifierConfig, "VERIFIER_MAX_WAIT_S", -0.1),
        (VerifierConfig, "VERIFIER_MIN_PATH_PROBABILITY", 2.0),
        (VerifierConfig, "VERIFIER_THREADS", -1),
        (DrafterConfig, "DRAFTER_STEP_TOKENS", 0),
        (DrafterConfig, "DRAFTER_MAX_NODES", 0),
        (DrafterConfig, "DRAFTER_SHARPNESS", 0.0),
        (DrafterConfig, "DRAFTER_THREADS", -1),
        (DrafterConfig, "DRAFTER_GRACE_S", -1.0),
    ],
)
def test_a_setting_that_would_hang_is_refused_by_name(
    kind: type[VerifierConfig | DrafterConfig], name: str, value: float
) -> None:
    setting: dict[str, Any] = {name.partition("_")[2].lower(): value}
    with pytest.raises(InvalidArgument, match=f"{name}={value}"):
        kind(model="somewhere", **setting)
