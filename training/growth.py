"""Starting from a smaller trained model: its layers, and new ones between them that change nothing yet.

A new layer's two output projections are zero, so it adds nothing to the residual stream, and the grown model computes
the small one's function at its first step (Chen, Goodfellow and Shlens, "Net2Net", 2016, arXiv 1511.05641).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from slipstream.errors import FailedPrecondition

SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


@torch.no_grad()
def grow(model: Any, folder: Path) -> None:
    """Overwrites fresh `model` with the checkpoint in `folder`. Raises FailedPrecondition for another width."""
    small = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = small.state_dict()
    layers, have = model.config.num_hidden_layers, small.config.num_hidden_layers
    origins = placed(have, layers)
    for name, parameter in model.state_dict().items():
        origin = name
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            source = origins[int(number)]
            if source is None:
                if rest in SILENT:
                    parameter.zero_()
                continue
            origin = f"model.layers.{source}.{rest}"
        if weights[origin].shape != parameter.shape:
            raise FailedPrecondition(f"{folder} has {origin} of another shape; start from a model of the same width.")
        parameter.copy_(weights[origin])


def placed(have: int, layers: int) -> list[int | None]:
    """For each of `layers` places the old layer that stands there, or None for a new one; new ones evenly between."""
    if have > layers:
        raise FailedPrecondition(f"the start has {have} layers, more than the {layers} asked for.")
    old = [round((index + 1) * layers / have) - 1 for index in range(have)]
    return [old.index(place) if place in old else None for place in range(layers)]
