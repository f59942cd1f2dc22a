"""A checkpoint's folder, replaced as a whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from training.corpus import save_vocabulary


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to write to, which takes `folder`'s place in the end; if anything is raised, it stays as it was.
    A reader sees the old or the new one, never a mix."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        yield fresh
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone; a server may run under another account
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)


def save_model(model: Any, tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write config, bf16 safetensors and tokenizer to `folder`, which is replaced."""
    with replacing(folder) as fresh:
        model.config._name_or_path = ""
        model.save_pretrained(fresh)
        save_vocabulary(tokenizer, fresh, context)
