"""Random checkpoints as deep as real ones, with a few channels of activations far above the others, in bfloat16.

Six layers round less than thirty, and activations of equal size less than those of trained models, where a few channels
of the residual stream are 50 to 100 times the others (Dettmers et al. 2022, LLM.int8). Widths stay small: seconds each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.checkpoints import FAMILIES, common, save_tokenizer
from tests.support.outlier_channels import (
    CHANNELS,
    EMBEDDING,
    FACTOR,
    STREAMS,
    enlarge_stream,
    quieten,
    scale_channels,
)

VOCABULARY = 1024
RANGE = 0.1
"""Standard deviation of initial weights."""
WINDOW = 32
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": None}


@dataclass(frozen=True)
class Deep:
    family: str
    layers: int
    changes: dict[str, Any] = field(default_factory=dict)


TIED: dict[str, Any] = {"tie_word_embeddings": True}
DEEP: dict[str, Deep] = {
    "llama_tied": Deep("llama", 30, TIED),
    "llama3_rope": Deep("llama", 32, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": Deep("qwen2", 28),
    "qwen2_tied": Deep("qwen2", 24, TIED),
    "qwen3": Deep("qwen3", 36),
    "mistral_window": Deep("mistral", 32, {"sliding_window": WINDOW}),
    "gemma3_tied": Deep("gemma3", 26, {**_SLIDING, **TIED}),
    "phi3": Deep("phi3", 32),
    "olmo2": Deep("olmo2", 32),
    "gpt_neox": Deep("gpt_neox", 44),
    "gpt_oss": Deep("gpt_oss", 24, _SLIDING),
    "mixtral": Deep("mixtral", 32),
    "qwen3_moe": Deep("qwen3_moe", 48),
    "falcon": Deep("falcon", 24),
    "falcon_alibi": Deep("falcon_alibi", 24),
    "bloom": Deep("bloom", 24),
    "mpt": Deep("mpt", 24),
    "gpt_neo": Deep("gpt_neo", 24, {"attention_types": [[["global", "local"], 12]], "window_size": WINDOW}),
    "gpt_neox_japanese": Deep("gpt_neox_japanese", 24),
    "xglm": Deep("xglm", 24, {"num_layers": 24}),
    "openai_gpt": Deep("openai_gpt", 24, {"n_layer": 24}),
    "rembert": Deep("rembert", 24),
    "megatron_bert": Deep("megatron_bert", 24),
}
NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25, "hidden_act": "gelu", "rope_parameters": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
}


def save_deep(name: str, folder: Path, seed: int = 0) -> Path:
    """One of `DEEP` in bfloat16, with a tokenizer of as many tokens."""
    deep = DEEP[name]
    kind, special = (FAMILIES | NEW)[deep.family]
    depth = {"vocab_size": VOCABULARY, "num_hidden_layers": deep.layers, "initializer_range": RANGE}
    settings = {**common(), **special, **depth, **deep.changes}
    own = {key for key in ("layer_types", "rope_parameters") if settings.get(key) is None}
    config = getattr(transformers, kind)(**{key: value for key, value in settings.items() if key not in own})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if deep.family in STREAMS:
        enlarge_stream(model, STREAMS[deep.family])
    else:
        enlarge(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return folder


_WRITES = ("o_proj", "down_proj", "attention.dense", "dense_4h_to_h", "embed_tokens", "embed_in")
"""Parts whose output is added to the residual stream."""
_READS = ("input_layernorm", "pre_feedforward_layernorm", "model.norm", "final_layer_norm")
"""Norms of the residual stream, in every family; `post_attention_layernorm` is one or writes into it."""


@torch.no_grad()
def enlarge(model: Any) -> None:
    """Makes `CHANNELS` of the residual stream `FACTOR` times as large. Norms that read it make them small again, as
    those of trained models do, so that all channels count in the answer."""
    names = dict(model.named_modules())
    post = any(name.endswith(("post_feedforward_layernorm",)) for name in names)
    pre = any(name.endswith(("input_layernorm",)) for name in names)
    tied = bool(model.config.tie_word_embeddings)
    share = (2 * model.config.num_hidden_layers) ** -0.5  # of a layer's part, as in GPT-2's initialisation
    for name, weight in model.named_parameters():
        part, _, kind = name.rpartition(".")
        reads = part.endswith(_READS) or (part.endswith("post_attention_layernorm") and not post)
        if reads:
            last = part.endswith(("model.norm", "final_layer_norm"))
            quieten(weight, FACTOR**2 if tied and last else FACTOR, _offset(model), kind == "weight")
            if tied and last:
                _turn(weight, _offset(model))
        elif post and part.endswith(("post_attention_layernorm", "post_feedforward_layernorm")):
            _raise(weight, share, _offset(model))
        elif (name.endswith(_WRITES) or part.endswith(_WRITES)) and not (post and "embed" not in name):
            weight.mul_(EMBEDDING if "embed" in name else share)
            scale_channels(weight, 1 if "embed" in name else _output_axis(weight, model.config.hidden_size), FACTOR)
    assert pre or post


def _offset(model: Any) -> float:
    """Gemma's norms multiply by one more than their weight."""
    return 1.0 if model.config.model_type.startswith("gemma") else 0.0


def _turn(weight: torch.Tensor, offset: float) -> None:
    """The last norm of a tied model: every second channel changes its sign, or each token would follow itself."""
    weight.add_(offset)
    weight[::2] *= -1
    weight.div_(EMBEDDING).sub_(offset)


def _raise(weight: torch.Tensor, share: float, offset: float) -> None:
    """The weight of a norm that writes into the residual stream."""
    weight.add_(offset).mul_(share)
    weight[list(CHANNELS)] *= FACTOR
    weight.sub_(offset)


def _output_axis(weight: torch.Tensor, hidden: int) -> int:
    """The axis of the residual stream: the first of [hidden, inputs] and of a bias [hidden]; experts have one axis
    more, and gpt-oss' are [experts, inputs, hidden]."""
    if weight.dim() < 3:
        return weight.dim() - 1 if weight.dim() == 2 and weight.shape[0] != hidden else 0
    return 1 if weight.shape[1] == hidden else 2


def largest_activations(model: Any, tokens: list[int]) -> float:
    """How many times the typical channel the largest one is, in the middle of the model."""
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    sizes = states[len(states) // 2][0].float().abs().mean(dim=0)
    return float(sizes.max() / sizes.median())
