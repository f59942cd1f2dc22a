"""Tiny random checkpoints of many families, as folders the engine can load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

VOCABULARY = 199
WINDOW = 12

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    # Large enough that logits reach 3-7 and a wrong mask cannot hide below the tolerance.
    "initializer_range": 0.15,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_SWA: dict[str, Any] = {"sliding_window": WINDOW}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    **_SWA,
}
_THREE_HEADS: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 3}
"""Slopes of ALiBi follow another rule where heads are no power of two."""
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", _SWA),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, **_SWA}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "layer_types": _TYPES, **_SWA}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "mixtral": ("MixtralConfig", _MOE),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            **_SHARED,
        },
    ),
    "gemma4": ("Gemma4TextConfig", {"global_head_dim": 32, "num_global_key_value_heads": 2, **_SHARED}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "layer_types": _TYPES, "rope_parameters": _ROPE, **_SWA, **_MOE}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": ("FalconConfig", {"multi_query": True, "bias": True}),
    "falcon_alibi": ("FalconConfig", {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    "bloom": ("BloomConfig", _THREE_HEADS),
    "mpt": ("MptConfig", {"max_seq_len": 512, "attn_config": {"clip_qkv": 2.0}, **_THREE_HEADS}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"attention_types": [[["local", "global"], 1], [["local"], 1]], "window_size": WINDOW},
    ),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}),
    "xglm": ("XGLMConfig", {"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4}),
    "openai_gpt": ("OpenAIGPTConfig", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "rembert": ("RemBertConfig", {"is_decoder": True}),
    "megatron_bert": ("MegatronBertConfig", {"is_decoder": True}),
}

UNEVEN = {"gemma3n": "matmul"}
"""Families of the library's path whose rows may depend on the others of a pass, and the operator of torch that is left:
Gemma 3n mixes its residual streams by products of two activations."""


SELDOM = frozenset({"falcon_multi_query", "gpt_neox_japanese", "xglm", "openai_gpt", "rembert", "megatron_bert"})
"""Families that few serve: the long suite has them. Each part of what serves them is another family's too."""
ALL = [pytest.param(family, marks=pytest.mark.slow if family in SELDOM else ()) for family in FAMILIES]
"""All families, as a test's parameters."""


def common() -> dict[str, Any]:
    """Settings that the families share."""
    return dict(_COMMON)


def save_checkpoint(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random fp32 checkpoint with a tokenizer of as many tokens; `changes` go to its configuration."""
    kind, special = FAMILIES[family]
    return save_model(kind, special | changes, folder, seed)


def save_model(kind: str, settings: dict[str, Any], folder: Path, seed: int = 0) -> Path:
    """Likewise, of the library's configuration class of this name."""
    config = getattr(transformers, kind)(**(_COMMON | settings))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def other_weights(folder: Path, copy: Path) -> Path:
    """A copy of a checkpoint in one file that has one tensor changed, the first layer's way back into the residual, and
    nothing else: the files have the same names and sizes."""
    shutil.copytree(folder, copy, symlinks=False)
    file = copy / "model.safetensors"
    with safe_open(file, "pt") as before:
        metadata = before.metadata()
    tensors = load_file(file)
    changed = next(name for name in sorted(tensors) if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors[changed] = -tensors[changed]
    save_file(tensors, file, metadata)
    return copy


def liven(folder: Path) -> None:
    """Norms and biases start at one and zero, where a forgotten one cannot be seen."""
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith(("norm.weight", "bias")):
            weight += 0.3 * torch.randn(weight.shape, generator=draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(folder: Path, size: int) -> None:
    """A word-level tokenizer whose token i is the word `ti`."""
    vocabulary = {f"t{index}": index for index in range(size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
