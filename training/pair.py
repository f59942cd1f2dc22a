"""Saving a trained pair: two checkpoint folders with one tokenizer, replaced atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from training.folder import replacing
from training.vocabulary import save_vocabulary


def save_model(model: Any, tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write config, bf16 safetensors and tokenizer to `folder`, which is replaced."""
    with replacing(folder) as fresh:
        model.config._name_or_path = ""
        model.save_pretrained(fresh)
        save_vocabulary(tokenizer, fresh, context)
