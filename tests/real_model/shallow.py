"""A draft model without training: the first layers of its target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

LAYERS = 4


def save_shallow(target: Path, folder: Path, layers: int = LAYERS) -> Path:
    """`folder` with the target's embeddings, first layers, norm and tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (target / name).exists():
            shutil.copy(target / name, folder)
    config = json.loads((target / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with safe_open(target / "model.safetensors", "pt") as file:
        # safe_open is no mapping: it cannot be iterated over.
        kept = {name: file.get_tensor(name) for name in file.keys() if _layer(name) < layers}  # noqa: SIM118
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(name: str) -> int:
    """The number of a tensor's layer; -1 outside of layers."""
    head, _, rest = name.partition(".layers.")
    return int(rest.partition(".")[0]) if rest and head else -1
