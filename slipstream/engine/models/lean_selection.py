"""The choice of the lean forward pass: for models that have its parts and no others.

Whether it then is the library's function is tried (`slipstream.engine.models.forward_trial`).
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.models.linear import quantised_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_OUTSIDE = {"", "model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"}
_LINEARS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_INSIDE = {"", "self_attn", "mlp", "mlp.act_fn", "input_layernorm", "post_attention_layernorm"} | _LINEARS
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}


def fits(model: Any) -> bool:
    """True if the model has the parts of a Llama-like decoder and no others, all as they were loaded: weights of one
    dtype on one device, plain or int8 where there are kernels, without hooks."""
    if model.config.model_type not in FAMILIES or model.config.hidden_act != "silu":
        return False
    modules = dict(model.named_modules())
    if any(map(_hooked, modules.values())):
        return False
    weights = list(model.parameters())
    others = {id(weight) for weight in weights if type(weight) is not torch.nn.Parameter}
    if others and (find_kernels() is None or not _in_bytes(modules, others)):
        return False
    if len({(weight.dtype, weight.device) for weight in weights}) != 1 or weights[0].dtype not in DTYPES:
        return False
    return _shaped(modules) and _whole_heads(modules)


def _in_bytes(modules: dict[str, Any], weights: set[int]) -> bool:
    """True if `weights` are those of the layers' linear parts, all of them, and kernels of ours multiply them."""
    linears = [part for name, part in modules.items() if any(name.endswith(f".{linear}") for linear in _LINEARS)]
    kept = all(quantised_bytes(part.weight.detach()) is not None for part in linears)
    return kept and {id(part.weight) for part in linears} == weights


def _hooked(module: Any) -> bool:
    """By torch's own hooks, or as placing a model on several devices does it: with a `forward` of the instance."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _shaped(modules: dict[str, Any]) -> bool:
    outside = {name for name in modules if not name.startswith("model.layers.")}
    if outside != _OUTSIDE or type(modules["lm_head"]) is not torch.nn.Linear:
        return False
    for index in range(len(modules["model.layers"])):
        prefix = f"model.layers.{index}"
        inside = {name.removeprefix(prefix).lstrip("."): part for name, part in modules.items() if _below(name, prefix)}
        if set(inside) not in (_INSIDE, _INSIDE | _HEAD_NORMS):
            return False
        if any(type(inside[name]) is not torch.nn.Linear for name in _LINEARS):
            return False
    return True


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _whole_heads(modules: dict[str, Any]) -> bool:
    """True if rotary embeddings turn all of a head, the same way for all layers."""
    rotary, like = modules["model.rotary_emb"], modules["model.embed_tokens"].weight
    cosine, _ = rotary(like, position_ids=torch.zeros(1, 1, dtype=torch.int64, device=like.device))
    return all(cosine.shape[-1] == module.head_dim for name, module in modules.items() if name.endswith("self_attn"))
