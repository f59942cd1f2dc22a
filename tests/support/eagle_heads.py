"""EAGLE heads for tests: random ones of every flag, and ones that know their target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from slipstream.proposers.eagle_checkpoint import open_head
from slipstream.proposers.eagle_head import EagleConfig, EagleHead
from slipstream.proposers.head_file import read_target
from tests.support.checkpoints import save_checkpoint

LAYERS = (0, 1, 2)


def config_of(
    target: str | Path,
    family: str = "llama",
    vocabulary: int | None = None,
    layer: dict[str, Any] | None = None,
    **flags: Any,
) -> EagleConfig:
    """Of a draft layer of the target's own width; `layer`: changes to the layer's configuration."""
    known = read_target(str(target))
    width = known.output.shape[1]
    fields: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": known.vocabulary,
        "rms_norm_eps": 1e-6,
    }
    made = AutoConfig.for_model(family, **(fields | (layer or {})))
    return EagleConfig(made, width, draft_vocabulary=vocabulary or known.vocabulary, **flags)


def save_easy_target(folder: Path, family: str = "llama", weight: float = 0.05, **changes: Any) -> Path:
    """A target whose layers hardly change what enters them, by this `weight`: what follows a token is learned from few
    texts. `changes` go to its configuration."""
    save_checkpoint(family, folder, seed=0, **changes)
    held = load_file(folder / "model.safetensors")
    for name, tensor in held.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= weight
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def random_head(target: str | Path, config: EagleConfig, seed: int = 0, scale: float = 0.2) -> EagleHead:
    """Its norms are random too, so that one left out shows."""
    known = read_target(str(target))
    ids = torch.arange(config.draft_vocabulary) * 2 if config.draft_vocabulary < known.vocabulary else None
    head = open_head(config, known, ids)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(head.named_parameters()):
            if parameter.requires_grad:
                drawn = torch.randn(parameter.shape, generator=noise)
                parameter.copy_(1.0 + 0.3 * drawn if parameter.dim() == 1 and "norm" in name else scale * drawn)
    return head


def knowing_head(target: str | Path, layers: tuple[int, ...]) -> EagleHead:
    """Knows what the layers of `save_easy_target` hardly change: the last token's embedding decides. EAGLE-3's attends
    to one pair alone and hands its embedding on."""
    window = {"sliding_window": 1, "layer_types": ["sliding_attention"], "num_key_value_heads": 4} if layers else {}
    head = random_head(target, config_of(target, layers=layers, layer=window), scale=1e-3)
    width = head.config.width
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name in ("lm_head.weight",):
                parameter.copy_(read_target(str(target)).output)
        if layers:
            attention: Any = head.layers[0]
            attention.self_attn.v_proj.weight[:, :width] = torch.eye(width)
            attention.self_attn.o_proj.weight.copy_(torch.eye(width))
        else:
            head.fc.weight[:, :width] = torch.eye(width) / float(head.embed_tokens.weight.std())
    return head
