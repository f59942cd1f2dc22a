"""A quantised checkpoint from the shipped target: int8 weights with a scale for each row, in the layout of
compressed-tensors (`int-quantized`). Activations are quantised by the engine, a scale for each token (W8A8)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.vllm.decoding import TARGET

LARGEST = 127
"""Of symmetric int8."""
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = _WEIGHTS | {"strategy": "token", "dynamic": True}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS}},
    "ignore": ["lm_head"],
}


def save_int8(folder: Path) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(f"{TARGET}/model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / LARGEST  # [rows, 1]
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return configure(folder, _W8A8)


def configure(folder: Path, quantisation: dict[str, Any]) -> Path:
    """Gives the folder the target's configuration, with this `quantization_config`, and its tokenizer."""
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{TARGET}/{file}", folder)
    config = json.loads(Path(TARGET, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folder
