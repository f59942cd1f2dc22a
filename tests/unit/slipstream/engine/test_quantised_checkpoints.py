"""Checkpoints that others quantised are read as the numbers that they stand for, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.errors import FailedPrecondition
from tests.support.checkpoints import save_checkpoint
from tests.support.packed_passes import library_model
from tests.support.quantised_checkpoints import name_method, save_fp8, save_mxfp4

METHODS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "hqq": {"quant_method": "hqq"},
    "a-later-one": {"quant_method": "a-later-one"},
}


@pytest.mark.parametrize(("family", "save"), [("llama", save_fp8), ("gpt_oss", save_mxfp4)])
def test_weights_are_the_numbers_that_the_file_stands_for(family: str, save: Any, tmp_path: Path) -> None:
    numbers = save(save_checkpoint(family, tmp_path / "own"), tmp_path / "quantised")
    found = library_model(str(tmp_path / "quantised"), "bfloat16").state_dict()
    assert found.keys() == numbers.keys()
    assert all(torch.equal(found[name], numbers[name]) for name in numbers)


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_of_other_quantisers_are_refused_before_a_weight_is_read(method: str, tmp_path: Path) -> None:
    folder = name_method(save_checkpoint("llama", tmp_path / "own"), tmp_path / "quantised", METHODS[method])
    with pytest.raises(FailedPrecondition, match=f"quantised by {method}") as refusal:
        load_checkpoint(str(folder))
    assert refusal.value.reason == "QUANTISATION_UNREADABLE" and "--engine vllm" in refusal.value.message


def test_missing_packages_of_readable_quantisations_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = name_method(save_checkpoint("llama", tmp_path / "own"), tmp_path / "quantised", method)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FailedPrecondition, match="needs bitsandbytes and accelerate"):
        load_checkpoint(str(folder))


def test_the_doctor_reports_an_unreadable_quantisation_in_one_line(tmp_path: Path) -> None:
    folder = name_method(save_checkpoint("llama", tmp_path / "own"), tmp_path / "quantised", METHODS["awq"])
    refused = CliRunner().invoke(app, ["doctor", "--target", str(folder), "--drafter", "ngram"])
    assert refused.exit_code == 1 and "quantised by awq" in refused.output and "Traceback" not in refused.output
