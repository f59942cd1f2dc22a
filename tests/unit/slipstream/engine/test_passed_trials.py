"""A trial that passed is not run again where everything that decides its outcome is the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.engine.models import forward_trial, passed_trials
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.lean_decoder import Rotary
from tests.support.checkpoints import other_weights, save_checkpoint

LEAN, LIBRARY = "llama", "gemma3"
rotary = Rotary.__call__


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were tried."""
    tried: list[str] = []
    run = forward_trial._Trial.__init__

    def counting(trial: object, model: object, layers: object, info: object, device: object) -> None:
        tried.append(info.name)  # type: ignore[attr-defined]
        run(trial, model, layers, info, device)  # type: ignore[arg-type]

    monkeypatch.setattr(forward_trial._Trial, "__init__", counting)
    return tried


@pytest.mark.parametrize("family", [LEAN, LIBRARY])
def test_a_second_start_serves_the_pass_that_the_trial_accepted(family: str, tmp_path: Path, trials: list[str]) -> None:
    folder = str(save_checkpoint(family, tmp_path / "model"))
    paths = [load_checkpoint(folder).forward_path for _ in range(2)]
    assert paths[0] == paths[1] and trials == ["model"]


def test_other_weights_of_the_same_size_are_tried_again(tmp_path: Path, trials: list[str]) -> None:
    folder = save_checkpoint(LEAN, tmp_path / "model")
    load_checkpoint(str(folder))
    load_checkpoint(str(other_weights(folder, tmp_path / "copy")))
    assert trials == ["model", "copy"]


@pytest.mark.parametrize("change", ["dtype", "engine", "kernels", "library"])
def test_a_trial_is_run_again_where_engine_kernels_library_or_dtype_changed(
    change: str, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_checkpoint(LEAN, tmp_path / "model"))
    load_checkpoint(folder, "float32")
    if change == "engine":
        monkeypatch.setattr(passed_trials, "_engine_digest", lambda: "another")
    if change == "kernels":
        monkeypatch.setattr(passed_trials, "find_kernels", lambda: object())
        monkeypatch.setattr(passed_trials, "kernels_name", lambda: "others")
    if change == "library":
        monkeypatch.setattr(passed_trials, "transformers", SimpleNamespace(__version__="0"))
    load_checkpoint(folder, "bfloat16" if change == "dtype" else "float32")
    assert len(trials) == 2


def test_a_trial_that_found_a_fault_is_run_again(
    tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_checkpoint(LEAN, tmp_path / "model"))
    with monkeypatch.context() as broken:
        broken.setattr(Rotary, "__call__", lambda self, positions: rotary(self, positions.clamp(max=3)))
        assert load_checkpoint(folder, "float32").info.forward_notice
    assert load_checkpoint(folder, "float32").forward_path != "library"
    assert trials == ["model", "model"]
