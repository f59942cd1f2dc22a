"""What `speculators` computes from our exports: `eagle_golden.json` holds some of its logits.

To make them again, in two environments (the second one has `speculators==0.9.0` and neither this package nor pytest):

    python -m tests.support.eagle_golden FOLDER
    python tests/support/eagle_golden.py FOLDER > tests/support/eagle_golden.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, norm before the residual, norms of the layers": {"norm_before_residual": True, "fc_norm": True},
    "qwen3, part of the vocabulary, norm before fc, normed output": {
        "family": "qwen3",
        "vocabulary": 64,
        "norm_before_fc": True,
        "norm_output": True,
    },
}
LENGTH, WIDTH, VOCABULARY = 12, 64, 199
ROWS, COLUMNS = (3, 9), (0, 1, 5, 40, 63)
"""Of the logits that are kept."""


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [LENGTH], of which pair j has number j + 1, and the target's states [LENGTH, 3 * WIDTH]."""
    noise = torch.Generator().manual_seed(11)
    return torch.randint(VOCABULARY, (LENGTH,), generator=noise), torch.randn(LENGTH, 3 * WIDTH, generator=noise)


def export(folder: Path) -> None:
    """Writes a target and one head for each case."""
    from slipstream.proposers.eagle_checkpoint import save_head
    from tests.support.checkpoints import save_checkpoint
    from tests.support.eagle_heads import LAYERS, config_of, random_head

    target = save_checkpoint("llama", folder / "target", seed=0)
    for name, flags in CASES.items():
        save_head(random_head(target, config_of(target, layers=LAYERS, **flags)), folder / name, str(target))
    tokens, features = inputs()
    save_file({"tokens": tokens, "features": features}, folder / "inputs.safetensors")


def compute(folder: Path) -> dict[str, Any]:
    """Logits [2 passes][ROWS][COLUMNS] of each case, as `speculators` computes them."""
    from speculators import SpeculatorModel  # type: ignore[import-not-found]

    held = load_file(folder / "inputs.safetensors")
    tokens, features = held["tokens"][None, 1:], held["features"][None, :-1]
    found: dict[str, Any] = {}
    for name in CASES:
        model = SpeculatorModel.from_pretrained(folder / name)
        model.config.transformer_layer_config._attn_implementation = "eager"
        model = type(model).from_pretrained(folder / name, config=model.config).float().eval()
        passes: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda _module, _inputs, output: passes.append(output[0]))  # noqa: B023
        with torch.inference_mode():
            model(features, tokens, torch.zeros_like(tokens), ttt_steps=2)
        found[name] = [[[round(float(each[row, at]), 4) for at in COLUMNS] for row in ROWS] for each in passes]
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if __package__:
        export(place)
    else:
        print(json.dumps(compute(place), indent=1))
