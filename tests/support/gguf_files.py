"""GGUF files of tiny random checkpoints, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.support.checkpoints import _COMMON, FAMILIES

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
Write = Callable[[gguf.GGUFWriter], None]


def random_model(family: str, **changes: Any) -> Any:
    """A float32 model with the vocabulary of `vocabulary`."""
    kind, special = FAMILIES[family]
    wanted = _COMMON | special | {"vocab_size": len(vocabulary()), "eos_token_id": 1, "bos_token_id": 0} | changes
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**wanted)).eval()


def vocabulary() -> list[str]:
    """Two control tokens, GPT-2's alphabet of bytes, and a few merges."""
    from slipstream.tokenizer.codec import _ALPHABET

    return ["<|end|>", "<|stop|>", *_ALPHABET, "th", "he", "12", "ab"]


def save_gguf(model: Any, family: str, file: Path, kind: str = "F32", more: Write | None = None) -> Path:
    """`kind`: the type of its matrices, as gguf names it. `more` adds to the header, or replaces what stands there."""
    arch = ARCHITECTURES[family]
    config, names = model.config, gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if family == "llama":
        writer.add_rope_dimension_count(head)
    elif family == "qwen3":
        writer.add_key_length(head)
        writer.add_value_length(head)
    _write_tokenizer(writer)
    if more is not None:
        more(writer)
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name.startswith("lm_head"):
            continue
        _write_tensor(writer, names.get_name(name, (".weight", ".bias")), name, tensor, (family, config, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_tensor(
    writer: gguf.GGUFWriter, placed: str, name: str, tensor: torch.Tensor, how: tuple[str, Any, str]
) -> None:
    family, config, kind = how
    values = tensor.float().numpy()
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        values = permuted(values, heads)
    if values.ndim < 2 or kind == "F32":
        writer.add_tensor(placed, values)
    else:
        wanted = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(placed, gguf.quants.quantize(values, wanted), raw_dtype=wanted)


def permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp rotates them: both halves of a head in turn."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h", "h e", "1 2", "a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def header(**fields: Any) -> Write:
    """Adds these fields, whose names have `_` for `.` nowhere: give them by `**{"a.b": 1}`."""

    def write(writer: gguf.GGUFWriter) -> None:
        for key, value in fields.items():
            add: Mapping[type, Callable[[str, Any], None]] = {
                bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string
            }  # fmt: skip
            add[type(value)](key, value)

    return write
