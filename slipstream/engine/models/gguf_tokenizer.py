"""The tokenizer of a GGUF file, with what transformers' reader leaves out of it.

A file names how text is cut before merges by a word (`tokenizer.ggml.pre`). transformers knows some of them and takes
GPT-2's rule for the others without a word: digits of SmolLM2 or StarCoder would become other tokens than the model was
trained on. Words that neither knows are refused. The rules are llama.cpp's (src/llama-vocab.cpp).
"""

from __future__ import annotations

from typing import Any

from tokenizers import pre_tokenizers

from slipstream.engine.models.gguf_file import OWN_FOLDER, GgufFile, refused

GPT2 = frozenset(
    [
        "default",
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "gigachat",
        "jina-v2-es",
        "jina-v2-de",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
    ]
)
"""Words for GPT-2's own rule."""
SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Words for single digits, then GPT-2's rule."""
WHOLE_WORDS = frozenset(
    ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"]
)
"""Words for a vocabulary whose entries are taken whole, whatever the merges say, behind a beginning-of-text token."""


def load_tokenizer(header: GgufFile) -> Any:
    """The library's tokenizer. Raises FailedPrecondition for a kind that is not known."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(header.file.parent), gguf_file=header.file.name, local_files_only=True
        )
    except Exception as error:  # tokenizers raises bare Exception
        raise refused(
            header.file, f"transformers cannot read its tokenizer ({str(error).splitlines()[0]})", OWN_FOLDER
        ) from error
    if header.fields.get("tokenizer.ggml.model") == "gpt2":
        _cut_as_trained(tokenizer, header)
    return tokenizer


def _cut_as_trained(tokenizer: Any, header: GgufFile) -> None:
    backend, word = tokenizer.backend_tokenizer, str(header.fields.get("tokenizer.ggml.pre") or "default")
    if word in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif word not in GPT2 and not _known_to_library(word):
        raise refused(header.file, f"how its tokenizer cuts text ({word!r}) is not known here", OWN_FOLDER)
    if word in WHOLE_WORDS:
        backend.model.ignore_merges = True
        if header.fields.get("tokenizer.ggml.add_bos_token") is None and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True


def _known_to_library(word: str) -> bool:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # older ones choose by the architecture
        return word in ("llama-bpe", "qwen2")
    return word in GGUF_PRE_TOKENIZER_SPLITS
