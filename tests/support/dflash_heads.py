"""DFlash block drafters for tests: random ones in both layouts, and what a plain implementation makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.proposers.weights import embedding_weight, output_weight

BLOCK, MASK, LAYERS = 6, 7, (1, 2)
"""Rows of a block, the mask's token, and the target's layers by what enters them (3 is the last hidden state)."""
HEADS, KV_HEADS, SIZE, INNER = 4, 2, 16, 96
EPS, THETA = 1e-6, 10000.0
Tensors = dict[str, Tensor]


def random_tensors(width: int = 64, reads: int = 2, layers: int = 2, seed: int = 0, scale: float = 0.15) -> Tensors:
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


def config_of(width: int = 64, layers: int = 2, *, speculators: bool = False, **changes: Any) -> dict[str, Any]:
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
    if speculators:
        own = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": layer,
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": list(LAYERS),
            "sample_from_anchor": False,
        }
        return own | changes
    nested = {"mask_token_id": MASK, "target_layer_ids": [each - 1 for each in LAYERS]}
    return layer | {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": nested} | changes


def save_dflash(folder: Path, tensors: Tensors, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def plain_block(target: str, tensors: Tensors, features: Tensor, root: int) -> Tensor:
    """[BLOCK - 1, vocabulary] logits behind a text with these features [T, reads * width] and then `root`, row by row
    and head by head, as the paper says it."""
    text = _norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    rows = embedding_weight(target)[torch.tensor([root, *[MASK] * (BLOCK - 1)])]
    count, layer = len(text), 0
    while f"layers.{layer}.mlp.up_proj.weight" in tensors:
        of = {key.removeprefix(f"layers.{layer}."): value for key, value in tensors.items()}
        inside = _norm(rows, of["input_layernorm.weight"])
        everything = torch.cat((text, inside))
        mixed = []
        for row in range(BLOCK):
            parts = []
            for head in range(HEADS):
                own = slice(head * SIZE, (head + 1) * SIZE)
                other = head * KV_HEADS // HEADS
                shared = slice(other * SIZE, (other + 1) * SIZE)
                query = inside[row] @ of["self_attn.q_proj.weight"][own].T
                query = _turned(_norm(query, of["self_attn.q_norm.weight"]), count + row)
                scores, values = [], []
                for position, each in enumerate(everything):
                    key = _norm(each @ of["self_attn.k_proj.weight"][shared].T, of["self_attn.k_norm.weight"])
                    scores.append(query @ _turned(key, position) / SIZE**0.5)
                    values.append(each @ of["self_attn.v_proj.weight"][shared].T)
                parts.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            mixed.append(torch.cat(parts) @ of["self_attn.o_proj.weight"].T)
        rows = rows + torch.stack(mixed)
        inside = _norm(rows, of["post_attention_layernorm.weight"])
        gate, up = inside @ of["mlp.gate_proj.weight"].T, inside @ of["mlp.up_proj.weight"].T
        rows = rows + (gate * gate.sigmoid() * up) @ of["mlp.down_proj.weight"].T
        layer += 1
    output = tensors["lm_head.weight"] if "lm_head.weight" in tensors else output_weight(target)
    return _norm(rows[1:], tensors["norm.weight"]) @ output.T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS) ** -0.5 * weight


def _turned(x: Tensor, position: int) -> Tensor:
    """Rotary embedding: halves of the head are pairs of coordinates."""
    half = SIZE // 2
    angles = position * THETA ** (-torch.arange(half) / half)
    first, second = x[:half], x[half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))
