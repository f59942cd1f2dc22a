"""A Llama checkpoint with a byte-level BPE tokenizer as GGUF, for llama.cpp and OpenVINO GenAI.

usage: python -m benchmarks.peers.export_gguf CHECKPOINT FILE [f32|bf16|f16]    (needs the package `gguf`)

llama.cpp's own converter knows tokenizers by a hash of what they do, and so refuses one that was trained here. Weights
are the checkpoint's, in the type asked for; norms stay in f32 as llama.cpp wants them. Names of tensors follow
llama.cpp, `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NORMAL, CONTROL = 1, 3
"""llama.cpp's types of tokens."""


def name(tensor: str) -> str:
    """llama.cpp's name of a checkpoint's tensor. Raises KeyError for one that no Llama has."""
    stem = tensor.removesuffix(".weight")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.weight"
    _, _, layer, inside = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inside]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A query or key projection [heads * d, h] with its rows in llama.cpp's order: there the two numbers that RoPE
    turns together are neighbours, in the checkpoint they are d / 2 apart."""
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def export(checkpoint: Path, file: Path, kind: str) -> None:
    """Writes the file, whole or not at all; without a sliding window, so it is the checkpoint for texts that fit into
    one. Raises ValueError for a checkpoint that is no plain Llama or Mistral."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    rotation = config.get("rope_parameters", {}).get("rope_type", "default")
    if config["model_type"] not in ("llama", "mistral") or rotation != "default":
        raise ValueError(f"{checkpoint} is no Llama or Mistral with plain RoPE.")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "llama")
    writer.add_name(checkpoint.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    files = {"f32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
    writer.add_file_type(files.get(kind, gguf.LlamaFileType.MOSTLY_F16))
    add_tokenizer(writer, checkpoint, config)
    for tensor, weight in load_file(checkpoint / "model.safetensors").items():
        if "q_proj" in tensor or "k_proj" in tensor:
            weight = interleaved(weight, heads if "q_proj" in tensor else kv_heads)
        add_tensor(writer, name(tensor), weight, "f32" if weight.ndim == 1 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)


PRE_TOKENIZERS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""llama.cpp's names."""


def add_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    cut = tokenizer["pre_tokenizer"]
    kinds = tuple(each["type"] for each in cut.get("pretokenizers", [cut]))
    if tokenizer["model"]["type"] != "BPE" or kinds not in PRE_TOKENIZERS:
        raise ValueError(f"the tokenizer of {checkpoint} is no byte-level BPE.")
    ids = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ids |= special
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[kinds])
    writer.add_token_list([ids.get(number, f"<unused{number}>") for number in numbers])
    writer.add_token_types([CONTROL if number in special else NORMAL for number in numbers])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_tensor(writer: Any, tensor: str, weight: torch.Tensor, kind: str) -> None:
    import gguf

    weight = weight.to(TYPES[kind]).contiguous()
    if kind == "bf16":  # numpy has no such type: the bits travel as bytes
        raw = weight.view(torch.uint8).numpy()
        writer.add_tensor(tensor, raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(tensor, weight.numpy())


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if sys.argv[3:] else "f32")
