"""What `speculators` computes with DFlash block drafters of ours: `dflash_golden.json` holds some of its logits, and
the configuration with which it saves the same tensors.

To make them again, in two environments (the second one has `speculators==0.9.0` and neither this package nor pytest):

    python -m tests.support.dflash_golden FOLDER
    python tests/support/dflash_golden.py FOLDER > tests/support/dflash_golden.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CASES: dict[str, dict[str, Any]] = {
    "two layers": {},
    "part of the vocabulary, four draft layers, three layers in another order": {
        "layers": 4,
        "reads": [2, 0, 1],
        "vocabulary": 64,
    },
    "a llama's configuration, biases, another base of the rotation": {
        "layer": {"model_type": "llama", "attention_bias": True, "rope_theta": 500.0, "rms_norm_eps": 1e-3},
    },
}
WIDTH, VOCABULARY, ANCHORS = 64, 199, (5, 9)
"""Anchors: numbers of the tokens that blocks begin with, two in one pass."""
LENGTH = 18
ROWS, COLUMNS = (1, 3, 5), (0, 1, 5, 40, 63)
"""Of the logits of each block, its first token's row included, that are kept."""


def inputs(reads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [LENGTH] and the target's states of each of them, [LENGTH, reads * WIDTH]."""
    noise = torch.Generator().manual_seed(11)
    return torch.randint(VOCABULARY, (LENGTH,), generator=noise), torch.randn(LENGTH, reads * WIDTH, generator=noise)


def drafter(
    *,
    layers: int = 2,
    reads: list[int] | None = None,
    vocabulary: int = VOCABULARY,
    layer: dict[str, Any] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and configuration of a case."""
    from tests.support.dflash_heads import HEADS, KV_HEADS, LAYERS, SIZE, config_of, random_tensors

    numbers = reads or list(LAYERS)
    tensors = random_tensors(WIDTH, len(numbers), layers)
    config = config_of(WIDTH, layers, speculators=True, draft_vocab_size=vocabulary, aux_hidden_state_layer_ids=numbers)
    config["transformer_layer_config"] |= layer or {}
    noise = torch.Generator().manual_seed(5)
    if vocabulary < VOCABULARY:
        known = torch.arange(vocabulary) * 3
        tensors["lm_head.weight"] = torch.randn(vocabulary, WIDTH, generator=noise)
        tensors["d2t"] = known - torch.arange(vocabulary)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, known, True)
    if (layer or {}).get("attention_bias"):
        for at in range(layers):
            for name, rows in (("q", HEADS * SIZE), ("k", KV_HEADS * SIZE), ("v", KV_HEADS * SIZE), ("o", WIDTH)):
                tensors[f"layers.{at}.self_attn.{name}_proj.bias"] = torch.randn(rows, generator=noise)
    return tensors, config


def export(folder: Path) -> None:
    """Writes a target, and of each case a drafter with its inputs."""
    from tests.support.checkpoints import save_checkpoint
    from tests.support.dflash_heads import save_dflash

    target = save_checkpoint("llama", folder / "target", seed=0)
    for name, choices in CASES.items():
        tensors, config = drafter(**choices)
        config["speculators_config"] = {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}],
            "verifier": {"name_or_path": str(target), "architectures": []},
        }
        save_dflash(folder / name, tensors, config)
        tokens, features = inputs(len(config["aux_hidden_state_layer_ids"]))
        save_file({"tokens": tokens, "features": features}, folder / name / "inputs")


def compute(folder: Path) -> dict[str, Any]:
    """Of each case as `speculators` has it: logits [ANCHORS][ROWS][COLUMNS] and the saved configuration. Raises
    RuntimeError where it saves other tensors than it read."""
    from speculators import SpeculatorModel  # type: ignore[import-not-found]
    from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]

    loss = resolve_loss_config("kl_div", "eager")
    found: dict[str, Any] = {}
    for name in CASES:
        held = load_file(folder / name / "inputs")
        model = SpeculatorModel.from_pretrained(folder / name)
        model.config.transformer_layer_config._attn_implementation = "eager"
        model = type(model).from_pretrained(folder / name, config=model.config).float().eval()
        passes: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda _module, _inputs, output: passes.append(output[0]))  # noqa: B023
        features, tokens = held["features"][None], held["tokens"][None]
        anchors = torch.zeros_like(tokens)
        anchors[0, list(ANCHORS)] = 1
        last, documents = features[..., :WIDTH], torch.zeros_like(tokens)
        with torch.inference_mode():
            model(features, tokens, anchors, last, documents, loss_config=loss, max_anchors=len(ANCHORS))
        model.save_pretrained(folder / name / "saved")
        own, saved = (load_file(folder / name / at / "model.safetensors") for at in ("", "saved"))
        if own.keys() != saved.keys() or not all(torch.equal(own[key], saved[key]) for key in own):
            raise RuntimeError(f"{name}: saved {sorted(saved)}, read {sorted(own)}")
        config = json.loads((folder / name / "saved" / "config.json").read_text())
        config["speculators_config"]["verifier"]["name_or_path"] = "target"
        blocks = passes[0].unflatten(0, (len(ANCHORS), -1))
        found[name] = {
            "logits": [[[round(float(each[row, at]), 4) for at in COLUMNS] for row in ROWS] for each in blocks],
            "config": config,
        }
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if __package__:
        export(place)
    else:
        print(json.dumps(compute(place), indent=1))
