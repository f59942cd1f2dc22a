"""`slipstream serve --engine vllm` finds the interpreter that has vLLM, or says what to do."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

import pytest

from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.serving.fleet import Fleet, vllm_python
from slipstream.serving.options import FleetOptions
from verifier_svc.config import VerifierConfig

fleet_module = import_module("slipstream.serving.fleet")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIPSTREAM_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(fleet_module, "VLLM_PYTHON", Path("no-such-environment/bin/python"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)


def test_without_vllm_the_error_names_the_command_that_installs_it() -> None:
    with pytest.raises(FailedPrecondition, match="make setup-vllm"):
        vllm_python()


def test_the_variable_comes_first_and_must_be_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", str(tmp_path / "missing"))
    with pytest.raises(FailedPrecondition, match="is no file"):
        vllm_python()
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", sys.executable)
    assert vllm_python() == sys.executable


def test_the_environment_of_make_setup_vllm_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "made/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(fleet_module, "VLLM_PYTHON", Path("made/bin/python"))
    assert vllm_python() == str(python)


def test_the_verifier_alone_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", "/bin/sh")
    fleet = Fleet("target", {"ngram": ""}, "auto", 1, FleetOptions(engine="vllm"))
    assert fleet.verifier._python == "/bin/sh" and fleet.verifier._settings["VERIFIER_ENGINE"] == "vllm"
    assert fleet.drafters["ngram"]._python == sys.executable
    assert Fleet("target", {"ngram": ""}, "auto", 1).verifier._python == sys.executable


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "llama.cpp"}, "choose one of embedded, vllm"),
        ({"vllm_args": "--seed 1"}, "needs VERIFIER_ENGINE=vllm"),
        ({"engine": "vllm", "vllm_step_timeout_s": 0.0}, "VLLM_STEP_TIMEOUT_S"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        VerifierConfig(model="m", **settings)  # type: ignore[arg-type]


def test_methods_that_take_part_in_the_targets_passes_are_put_into_the_verifier() -> None:
    fleet = Fleet("target", {"lookahead": "", "ngram": ""}, "auto", 1)
    assert fleet.verifier._settings["VERIFIER_LOCAL_DRAFTERS"] == "lookahead" and list(fleet.drafters) == ["ngram"]
