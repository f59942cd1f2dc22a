"""A second start reads a checkpoint's files without the library's modelling code: the same model, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.engine.models import checkpoint as checkpoints
from slipstream.engine.models import description
from slipstream.engine.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.engine.models.rehearsal import Player, Rehearsal, play
from tests.support.checkpoints import VOCABULARY, other_weights, save_checkpoint

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA_3}),
    "linear rope": ("llama", {"rope_parameters": LINEAR}),
    "ends": ("llama", {"eos_token_id": [3, 5]}),
    "mistral with a window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with some windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
}
LOADED = """
import sys
from slipstream.engine.models.checkpoint import load_checkpoint
print(load_checkpoint(sys.argv[1]).forward_path, "transformers.modeling_utils" in sys.modules)
"""


@pytest.fixture
def by_library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources of the models that the library loaded."""
    loaded: list[str] = []
    load = checkpoints._load_model

    def noted(source: str, *rest: Any) -> Any:
        loaded.append(source)
        return load(source, *rest)

    monkeypatch.setattr(checkpoints, "_load_model", noted)
    return loaded


def logits(loaded: Checkpoint, size: int = VOCABULARY) -> torch.Tensor:
    rehearsal = Rehearsal(size, loaded.info.max_length, 1)
    return play(Player(loaded.forward, loaded.layers, loaded.device), rehearsal).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_second_start_serves_the_same_model(name: str, dtype: str, tmp_path: Path, by_library: list[str]) -> None:
    family, changes = KNOWN[name]
    folder = str(save_checkpoint(family, tmp_path / "model", **changes))
    first, second = load_checkpoint(folder, dtype), load_checkpoint(folder, dtype)
    assert by_library == [folder]
    assert (second.info, second.layers) == (first.info, first.layers)
    assert torch.equal(logits(second), logits(first))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_start_hashes_the_weights_once(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no digest can be kept it reads all of them."""
    hashed: list[Path] = []
    digest = description.weights_digest
    monkeypatch.setattr(description, "weights_digest", lambda path: (hashed.append(path), digest(path))[1])
    folder = save_checkpoint(family, tmp_path / "model")
    for starts in (1, 2):
        load_checkpoint(str(folder), "float32")
        assert hashed == [folder] * starts


def test_files_in_pieces_are_read(tmp_path: Path, by_library: list[str]) -> None:
    folder = save_checkpoint("llama", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    first, second = load_checkpoint(str(folder)), load_checkpoint(str(folder))
    assert by_library == [str(folder)]
    assert torch.equal(logits(second), logits(first))


def test_the_second_start_imports_no_modelling_code(tmp_path: Path, by_library: list[str]) -> None:
    """The first one is this process's own; the second one is another process."""
    folder = str(save_checkpoint("llama", tmp_path / "model"))
    first = load_checkpoint(folder)
    assert by_library == [folder] and "transformers.modeling_utils" in sys.modules
    command = [sys.executable, "-c", LOADED, folder]
    path, imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert imported == "False"
    assert path == first.forward_path != "library"


def _another_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.sinks": torch.ones(4)}, file, {"format": "pt"})


def _dynamic(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": DYNAMIC}))


def _tied_beside_a_head(folder: Path) -> None:
    """The library takes tied embeddings for the head whatever the file says, and so it does here, or not at all."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


@pytest.mark.parametrize("change", [_another_tensor, _dynamic, _tied_beside_a_head])
def test_unknown_files_are_loaded_by_the_library(
    change: Callable[[Path], None], tmp_path: Path, by_library: list[str]
) -> None:
    folder = save_checkpoint("llama", tmp_path / "model")
    change(folder)
    for _ in range(2):
        load_checkpoint(str(folder), "float32")
    assert by_library == [str(folder)] * 2


def test_other_weights_are_loaded_by_the_library_again(tmp_path: Path, by_library: list[str]) -> None:
    folder = save_checkpoint("llama", tmp_path / "model")
    copy = str(other_weights(folder, tmp_path / "copy"))
    for each in (str(folder), copy, copy):
        load_checkpoint(each, "float32")
    assert by_library == [str(folder), copy]


def test_a_family_without_a_lean_pass_is_loaded_by_the_library(tmp_path: Path, by_library: list[str]) -> None:
    folder = str(save_checkpoint("gemma3", tmp_path / "model"))
    for _ in range(2):
        load_checkpoint(folder, "float32")
    assert by_library == [folder] * 2


def test_an_invalid_cache_entry_is_not_used(
    tmp_path: Path, by_library: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_checkpoint("llama", tmp_path / "model"))
    for kept in ("", "{", "null", "[1]", '["x", 1, 2]'):
        monkeypatch.setattr("slipstream.engine.models.known_files.report_of", lambda question, kept=kept: kept)
        assert load_checkpoint(folder, "float32").layers[0].window is None
    assert by_library == [folder] * 5
