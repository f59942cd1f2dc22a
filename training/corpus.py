"""The text to learn from: the Python files of one directory, by default the standard library's own sources."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Installed packages carry their own licences; the rest are generated tables or data with odd encodings on purpose.
LEFT_OUT_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data", "encoded_modules"}
)
HELD_OUT_PER_MILLE = 20


@dataclass(frozen=True)
class Document:
    """One file: its path inside the corpus (POSIX) and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class TrainingCorpus:
    """Documents split by file: no held-out file is ever trained on, not even by the tokenizer."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    name: str
    licence: str


def read_corpus(directory: Path | None) -> TrainingCorpus:
    """Read `directory` (the standard library if None), without duplicates; the split hangs on the path alone."""
    root = directory or Path(sysconfig.get_path("stdlib"))
    train: list[Document] = []
    held_out: list[Document] = []
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT_FOLDERS.intersection(relative.parts[:-1]):
            continue
        text = _read(path)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if not text.strip() or digest in seen:
            continue
        seen.add(digest)
        document = Document(relative.as_posix(), text)
        (held_out if is_held_out(document.path) else train).append(document)
    if directory is None:
        version = sysconfig.get_python_version()
        return TrainingCorpus(tuple(train), tuple(held_out), f"the Python {version} standard library", "PSF-2.0")
    return TrainingCorpus(tuple(train), tuple(held_out), f"the Python files of `{root.name}`", "as stated by its owner")


def is_held_out(path: str) -> bool:
    """About 2 % of files, chosen by a hash of the path, so that the split survives new and changed files."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""
