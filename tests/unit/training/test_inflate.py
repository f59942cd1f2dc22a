"""An inflated checkpoint computes the same function, at the requested size, with nothing left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from training.inflate.cli import parse_count
from training.inflate.inflate import inflate
from training.inflate.proportions import InflateRequest, Proportions, choose_proportions, layer_origins
from training.inflate.shards import ShardWriter, StoredWeights

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8, "head_dim": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}
WANTED = InflateRequest(parameters=250_000, hidden=64, layers=5, seed=3)


def make_base(folder: Path, family: str) -> Any:
    """A random model of unusual scale everywhere, so that nothing is right by accident."""
    model_class, config_class, extra = FAMILIES[family]
    torch.manual_seed(1)
    model = model_class(config_class(**SIZES, **extra)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) * 7 % 96
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=tokens, use_cache=False).logits.float()
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_an_inflated_model_computes_the_same_function(tmp_path: Path, family: str) -> None:
    base = make_base(tmp_path / "base", family)
    shape = inflate(tmp_path / "base", tmp_path / "big", WANTED)
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "big").eval()

    wanted, found = logits(base), logits(big)
    assert (wanted - found).abs().max() <= 1e-5 * wanted.abs().max()
    assert (shape.hidden, shape.layers) == (64, 5)
    assert abs(big.num_parameters() / WANTED.parameters - 1) < 0.1
    assert abs(shape.parameters() / big.num_parameters() - 1) < 0.02
    assert (tmp_path / "big" / "tokenizer.json").read_text() == "{}"


def test_only_the_stated_weights_are_zero(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "qwen3")
    shape = inflate(tmp_path / "base", tmp_path / "big", WANTED)
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "big")
    added = {str(place) for place, origin in enumerate(layer_origins(2, shape.layers)) if origin is None}
    for name, parameter in big.named_parameters():
        assert parameter.isfinite().all()
        zeros = int((parameter == 0).sum())
        output = name.endswith(("o_proj.weight", "down_proj.weight"))
        if not output:
            assert zeros == 0, name
        elif name.split(".")[2] in added:
            assert zeros == parameter.numel(), name
        else:
            assert 0 < zeros < parameter.numel(), name


def test_bf16_keeps_its_dtype_and_stored_weights_are_exact(tmp_path: Path) -> None:
    model = make_base(tmp_path / "base", "llama-tied").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    inflate(tmp_path / "base", tmp_path / "big", WANTED)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "big").dtype == torch.bfloat16
    wanted, found = (
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)) for name in ("base", "big")
    )
    assert (wanted - found).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_same_seed_gives_the_same_bytes_and_an_equal_result_is_kept(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "mistral")
    for name in ("one", "two"):
        inflate(tmp_path / "base", tmp_path / name, WANTED)
    one, two = (StoredWeights(tmp_path / name).fingerprint() for name in ("one", "two"))
    assert one == two
    before = (tmp_path / "one" / "model.safetensors").stat().st_mtime_ns
    inflate(tmp_path / "base", tmp_path / "one", WANTED)
    assert (tmp_path / "one" / "model.safetensors").stat().st_mtime_ns == before
    inflate(tmp_path / "base", tmp_path / "one", InflateRequest(250_000, 64, 5, seed=4))
    assert StoredWeights(tmp_path / "one").fingerprint() != two


def test_layer_types_follow_the_layers(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "qwen3")
    inflate(tmp_path / "base", tmp_path / "big", WANTED)
    config = json.loads((tmp_path / "big" / "config.json").read_text())
    assert len(config["layer_types"]) == config["num_hidden_layers"] == 5


def test_a_usual_shape_is_chosen() -> None:
    base = Proportions(
        hidden=384, layers=4, heads=6, kv_heads=2, head_dim=64, feed_forward=1024, vocabulary=4096, tied=True
    )
    for size in (50_000_000, 300_000_000, 1_500_000_000, 7_000_000_000):
        shape = choose_proportions(base, InflateRequest(size))
        assert abs(shape.parameters() / size - 1) < 0.05
        assert 8 <= shape.layers <= 64
        assert 1 <= shape.feed_forward / shape.hidden <= 8
    assert layer_origins(2, 5) == [0, None, 1, None, None]


def test_requests_that_cannot_be_exact_are_refused(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "llama-tied")
    with pytest.raises(InvalidArgument, match="hidden size must be one of 32, 64"):
        inflate(tmp_path / "base", tmp_path / "big", InflateRequest(10**6, hidden=48))
    with pytest.raises(InvalidArgument, match="already has 2 layers"):
        inflate(tmp_path / "base", tmp_path / "big", InflateRequest(10**6, layers=1))
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "mamba"}))
    with pytest.raises(FailedPrecondition, match="mamba"):
        inflate(tmp_path / "base", tmp_path / "big", InflateRequest(10**6))
    with pytest.raises(NotFound):
        inflate(tmp_path, tmp_path / "big", InflateRequest(10**6))
    assert not (tmp_path / "big").exists()


def test_big_checkpoints_are_written_in_shards(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=100)
    for number in range(5):
        writer.add(f"tensor{number}", torch.full((10,), float(number)))
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == [f"tensor{number}" for number in range(5)]
    assert len(set(index["weight_map"].values())) == 3
    stored = StoredWeights(tmp_path)
    assert float(stored["tensor4"][0]) == 4.0


def test_counts_of_parameters() -> None:
    assert parse_count("300M") == 300_000_000
    assert parse_count("1.5b") == 1_500_000_000


def test_the_command_prints_the_shape_as_json(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "llama-tied")
    words = ["inflate", str(tmp_path / "base"), str(tmp_path / "big"), "--parameters", "250K", "--hidden", "64"]
    done = CliRunner().invoke(app, [*words, "--layers", "5", "--json"])
    assert done.exit_code == 0, done.output
    shape = json.loads(done.stdout)
    assert (shape["hidden"], shape["layers"], shape["out"]) == (64, 5, str(tmp_path / "big"))
    config = json.loads((tmp_path / "big" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (shape["hidden"], shape["layers"])
