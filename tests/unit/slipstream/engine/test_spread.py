"""A model spread over devices says what it says on one, and what cannot be spread is refused before it is loaded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from slipstream.engine.engine import begin_unshared
from slipstream.engine.factory import open_engine
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.spread import Spread, spread_options
from slipstream.engine.segment import Segment
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import FailedPrecondition, InvalidArgument, SlipstreamError
from tests.checkpoints import save_checkpoint
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.target import open_target

LAYERS = 3
ON_DISK = {"model.layers.1": "disk", "lm_head": "disk"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    names = ("llama", "mixtral", "gpt_oss")
    return {name: str(save_checkpoint(name, tmp_path_factory.mktemp(name))) for name in names}


def device_map(folder: Path, places: dict[str, Any]) -> str:
    file = folder / "map.json"
    file.write_text(json.dumps(places), encoding="utf-8")
    return str(file)


def partly_on_disk(folder: Path) -> str:
    inside = ["model.embed_tokens", "model.rotary_emb", "model.norm", *(f"model.layers.{i}" for i in range(LAYERS))]
    return device_map(folder, dict.fromkeys(inside, "cpu") | ON_DISK)


def rounds(engine: TorchEngine) -> torch.Tensor:
    """The logits of two steps of two sessions; the second step stands on moved rows."""
    found = []
    sequences = [begin_unshared(engine, 64), begin_unshared(engine, 64)]
    for start in (5, 90):
        segments = [
            Segment(sequence, [start + at, 7, 8], [9, 10, 11, 12], [-1, 0, -1, 2])
            for at, sequence in enumerate(sequences)
        ]
        found.append(engine.forward(segments).logits)
        for segment in segments:
            engine.keep(segment, [2, 3])
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_on_disk_compute_exactly_what_they_compute_in_memory(
    family: str, folders: dict[str, str], tmp_path: Path
) -> None:
    settings = VerifierConfig(
        folders[family], device_map=partly_on_disk(tmp_path), offload_folder=str(tmp_path / "off"), kv_tokens=256
    )
    spread, whole = open_target(settings), open_engine(folders[family], kv_tokens=256, lean=False)
    assert isinstance(spread, TorchEngine) and isinstance(whole, TorchEngine)
    places = {name: parameter.device.type for name, parameter in spread._checkpoint.forward.model.named_parameters()}
    assert {place for name, place in places.items() if name.startswith(tuple(ON_DISK))} == {"meta"}  # not in memory
    assert set(places.values()) == {"cpu", "meta"}
    assert spread.model == whole.model
    assert torch.equal(rounds(spread), rounds(whole))


def test_the_library_divides_what_memory_it_is_given(folders: dict[str, str]) -> None:
    little = load_checkpoint(folders["llama"], spread=Spread(device_map="auto", device_memory=("cpu=300KB",)))
    assert "disk" in little.forward.model.hf_device_map.values()  # type: ignore[attr-defined]
    full = load_checkpoint(folders["llama"], spread=Spread(device_map="auto", device_memory=("cpu=1GB",)))
    assert all(parameter.device.type == "cpu" for parameter in full.forward.model.parameters())
    assert torch.equal(rounds(TorchEngine(little, 256)), rounds(TorchEngine(full, 256)))


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        (Spread(device_map="everywhere"), "none of auto, balanced"),
        (Spread(device_map="[]"), "must map modules"),
        (Spread(device_map="{}"), "must map modules"),
        (Spread(device_map='{"model": [0]}'), "must map modules"),
        (Spread(device_map="auto", device_memory=("20GiB",)), "0=20GiB"),
        (Spread(device_map="auto", device_memory=("cpu=",)), "0=20GiB"),
        (Spread(device_memory=("cpu=1GB",)), "need a device_map"),
        (Spread(offload_folder="off"), "need a device_map"),
        (Spread(ranks=2, device_map="auto"), "without torchrun"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    spread: Spread, words: str, folders: dict[str, str], tmp_path: Path
) -> None:
    if spread.device_map[:1] in ("[", "{"):
        spread = Spread(device_map=device_map(tmp_path, json.loads(spread.device_map)))
    with pytest.raises(InvalidArgument, match=words):
        load_checkpoint(folders["llama"], spread=spread)


@pytest.mark.parametrize("places", [{"model.layers.0": "cpu", "lm_head": "disk"}, {"": "nowhere"}, {"": 7}])
def test_a_map_that_does_not_fit_is_a_typed_error(
    places: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(SlipstreamError) as refused:
        load_checkpoint(folders["llama"], spread=Spread(device_map=device_map(tmp_path, places)))
    assert refused.value.reason == "MODEL_BROKEN"


@pytest.mark.parametrize(
    ("family", "ranks", "quantised", "words"),
    [
        ("llama", 3, "", "num_attention_heads is 4"),
        ("llama", 4, "", "num_key_value_heads is 2"),
        ("llama", 2, "int8", r"quantised \(int8\)"),
        ("gpt_oss", 2, "", "no plan to cut a gpt_oss"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(
    family: str, ranks: int, quantised: str, words: str, folders: dict[str, str]
) -> None:
    with pytest.raises(FailedPrecondition, match=words) as refused:
        load_checkpoint(folders[family], spread=Spread(ranks=ranks), quantisation=quantised)
    assert refused.value.reason == "NOT_DIVISIBLE"


def test_a_model_that_can_be_cut_is_left_to_the_librarys_plan(folders: dict[str, str]) -> None:
    options = spread_options(Spread(ranks=2), AutoConfig.from_pretrained(folders["llama"]), "")
    assert options["distributed_config"].tp_size == 2


def test_without_its_package_nothing_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    with pytest.raises(FailedPrecondition, match=r"slipstream-serve\[spread\]"):
        spread_options(Spread(device_map="auto"), SimpleNamespace(), "")
    assert spread_options(Spread(), SimpleNamespace(), "") == {}


def test_an_emulated_target_has_nothing_to_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="no weights to spread"):
        open_target(VerifierConfig("emulated:", device_map="auto"))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="no weights to cut"):
        open_target(VerifierConfig("emulated:"))
