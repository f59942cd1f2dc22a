"""DFlash and DSpark block drafters for tests of vLLM's speculators, which no test here trains: random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK, MASK, LAYERS = 6, 7, (1, 2)
"""Rows of a block, the mask's token, and the target's layers by what enters them (3 is the last hidden state)."""
HEADS, KV_HEADS, SIZE, INNER = 4, 2, 32, 96
EPS, THETA = 1e-6, 10000.0
Tensors = dict[str, Tensor]


def random_tensors(width: int = 128, reads: int = 2, layers: int = 2, seed: int = 0, scale: float = 0.15) -> Tensors:
    """Norms are random too, so that one left out shows."""
    noise = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, reads * width)}
    for layer in range(layers):
        inside = f"layers.{layer}."
        shapes |= {
            f"{inside}self_attn.q_proj.weight": (HEADS * SIZE, width),
            f"{inside}self_attn.k_proj.weight": (KV_HEADS * SIZE, width),
            f"{inside}self_attn.v_proj.weight": (KV_HEADS * SIZE, width),
            f"{inside}self_attn.o_proj.weight": (width, HEADS * SIZE),
            f"{inside}mlp.gate_proj.weight": (INNER, width),
            f"{inside}mlp.up_proj.weight": (INNER, width),
            f"{inside}mlp.down_proj.weight": (width, INNER),
        }
    tensors = {key: scale * torch.randn(shape, generator=noise) for key, shape in shapes.items()}
    norms = {"hidden_norm.weight": width, "norm.weight": width}
    for layer in range(layers):
        norms |= {f"layers.{layer}.self_attn.{each}_norm.weight": SIZE for each in "qk"}
        norms |= {f"layers.{layer}.{each}_layernorm.weight": width for each in ("input", "post_attention")}
    return tensors | {key: 1.0 + 0.3 * torch.randn(size, generator=noise) for key, size in norms.items()}


def config_of(width: int = 128, layers: int = 2, **changes: Any) -> dict[str, Any]:
    layer = {
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": 199,
    }
    nested = {"mask_token_id": MASK, "target_layer_ids": [each - 1 for each in LAYERS]}
    return layer | {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": nested} | changes


def save_dspark(folder: Path, rank: int = 16, width: int = 128) -> str:
    """DFlash's layers with a Markov head of this rank, which adds a bias by the token before to each row's logits."""
    config = config_of(width, architectures=["Qwen3DSparkModel"], markov_rank=rank, target_layer_ids=[0, 1])
    noise, shape = torch.Generator().manual_seed(1), (config["vocab_size"], rank)
    markov = {f"markov_head.markov_w{each}.weight": torch.randn(shape, generator=noise) for each in (1, 2)}
    return save_dflash(folder, random_tensors(width) | markov, config)


def save_dflash(folder: Path, tensors: Tensors, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
