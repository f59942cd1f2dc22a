"""Medusa heads for tests, written in every published layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.proposers.weights import output_weight

Tensors = dict[str, torch.Tensor]
LAYOUTS = ("medusa-1", "medusa-1 pickled", "medusa-2", "tgi", "vllm", "vllm shared", "vllm truncated")


def random_heads(target: str | Path, heads: int = 3, scale: float = 0.02, seed: int = 0) -> Tensors:
    """Blocks and biases of `heads` heads in TGI's layout. With a small scale every head proposes nearly what the target
    chose last."""
    width = output_weight(str(target)).shape[1]
    noise = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = scale * torch.randn(width, width, generator=noise)
        tensors[f"{head}.0.linear.bias"] = scale * torch.randn(width, generator=noise)
    return tensors


def save_heads(tensors: Tensors, folder: Path, name: str = "medusa_lm_head.safetensors") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    if file.suffix == ".safetensors":
        save_file({key: value.clone().contiguous() for key, value in tensors.items()}, file)
    else:
        torch.save(tensors, file)
    return str(folder)


def in_layout(layout: str, blocks: Tensors, outputs: list[torch.Tensor], folder: Path) -> str:
    """Saves heads whose outputs are `outputs` [rows, hidden]; the layouts that share an output take the first one, and
    TGI's takes the target's."""
    own = {f"{head}.1.weight": output for head, output in enumerate(outputs)}
    renamed = {
        "blocks.{}.layers.{}".format(*key.split(".")[:2]) + key[key.rindex(".") :]: value
        for key, value in blocks.items()
    }
    if layout == "medusa-1":
        return save_heads(blocks | own, folder)
    if layout == "medusa-1 pickled":
        return save_heads(blocks | own, folder, "medusa_lm_head.pt")
    if layout == "medusa-2":
        inside = {f"medusa_head.{key}": value for key, value in (blocks | own).items()}
        return save_heads(inside | {"model.norm.weight": torch.ones(4)}, folder, "model.safetensors")
    if layout == "tgi":
        return save_heads(blocks, folder)
    if layout == "vllm":
        outputs_of = {f"lm_heads.{head}.weight": output for head, output in enumerate(outputs)}
        return save_heads({f"medusa_heads.{key}": value for key, value in (renamed | outputs_of).items()}, folder)
    shared = {"lm_head.weight": outputs[0]}
    if layout == "vllm truncated":
        shared = {"lm_head.weight": outputs[0][:50], "token_map": torch.arange(50) * 2}
    return save_heads(renamed | shared, folder, "model.safetensors")
