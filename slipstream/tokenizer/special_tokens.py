"""A model's special tokens by the names that chat templates and clients know them by, such as `bos_token`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from slipstream.errors import NotFound
from slipstream.tokenizer.vocabulary import read_json, tokenizer_file

_END = "<|endoftext|>"
_OF_CLASS: Mapping[str, Mapping[str, str]] = {
    "CodeGenTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "sep_token": "<SEP>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
}
"""Special tokens of transformers' tokenizers of these classes where a configuration names none, as that of GPT-2
does."""
_CLASS_OF: Mapping[str, str] = {
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("dbrx", "gpt2", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
}
"""The class by `model_type`, where the configuration names none, and for `_WRONGLY_NAMED` whatever it names."""
_WRONGLY_NAMED = frozenset({"qwen2"})


def load_special_tokens(name: str) -> Mapping[str, str]:
    """The special tokens of a model's folder or hub repository by their names in its configuration, with those that a
    family has of its own (`image_token`). Raises FailedPrecondition for a broken one."""
    config = _read(name, "tokenizer_config.json")
    names = dict(config)
    if "added_tokens_decoder" not in config:  # configurations of earlier releases leave them to another file
        names |= _read(name, "special_tokens_map.json")
    extra = names.get("extra_special_tokens")
    if isinstance(extra, dict):
        names |= extra
    named = {each for each in names if each.endswith("_token")} | (set(extra) if isinstance(extra, dict) else set())
    found = {each: content for each in named if (content := _content(names[each])) is not None}
    return {**{each: token for each, token in _defaults(name, config).items() if each not in names}, **found}


def _defaults(name: str, config: Mapping[str, Any]) -> Mapping[str, str]:
    given = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    family = str(_read(name, "config.json").get("model_type"))
    if not given or family in _WRONGLY_NAMED:
        given = _CLASS_OF.get(family, "")
    return _OF_CLASS.get(given, {})


def _content(token: Any) -> str | None:
    """A token is a string, or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read(name: str, file: str) -> Mapping[str, Any]:
    with suppress(NotFound):
        return read_json(tokenizer_file(name, file))
    return {}
