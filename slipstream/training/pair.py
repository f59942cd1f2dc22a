"""Saving a trained pair: two checkpoint folders with one tokenizer, replaced atomically."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slipstream.training.vocabulary import save_vocabulary


def save_model(model: Any, tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write config, bf16 safetensors and tokenizer to `folder`; a reader sees the old or the new one, never a mix."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as scratch:
        fresh = Path(scratch) / "fresh"
        model.config._name_or_path = ""
        model.save_pretrained(fresh)
        # Written for the owner alone; a server may run as somebody else.
        (fresh / "model.safetensors").chmod(0o644)
        save_vocabulary(tokenizer, fresh, context)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)
        shutil.rmtree(Path(scratch) / "old", ignore_errors=True)
