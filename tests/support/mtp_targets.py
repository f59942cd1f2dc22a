"""A target with a layer that predicts one more token (MTP), as MiMo has it: the layer knows the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.eagle_heads import save_easy_target

EASY: dict[str, Any] = {"weight": 0.001, "hidden_size": 128}
"""Arguments of `save_easy_target`, for heads without training. vLLM's CPU build has no attention of heads below 32."""
WEIGHTS, SETTINGS = "model.safetensors", "config.json"


def save_mtp_target(folder: Path) -> tuple[str, str]:
    """Folders of the target with its MTP layer, and without it: a Qwen2. Its layers hardly change what enters them, so
    the last token's embedding decides, and the MTP layer hands it on."""
    plain, whole = folder / "plain", folder / "mtp"
    save_easy_target(plain, "qwen2", **EASY)
    shutil.copytree(plain, whole)
    held = load_file(plain / WEIGHTS)
    width = held["model.norm.weight"].shape[0]
    layer = "model.mtp_layers.0."
    added = {
        f"{layer}{name.removeprefix('model.layers.0.')}": tensor.clone()
        for name, tensor in held.items()
        if name.startswith("model.layers.0.")
    }
    for name, tensor in added.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    added[f"{layer}input_proj.weight"] = torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1)
    for name in ("token_layernorm", "hidden_layernorm"):
        added[f"{layer}{name}.weight"] = torch.ones(width)
    added[f"{layer}final_layernorm.weight"] = held["model.norm.weight"].clone()
    save_file(held | added, whole / WEIGHTS, {"format": "pt"})
    config = json.loads((whole / SETTINGS).read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (whole / SETTINGS).write_text(json.dumps(config))
    return str(whole), str(plain)
