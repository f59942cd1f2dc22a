"""A digest of a local checkpoint's weights by content: of what decides its logits, and nothing else.

config.json and the weight files count. A README, a chat template or generation_config.json do not: a folder whose card
was edited has the same weights. Each file is hashed once: its digest is kept in a cache directory under what the system
says of the file, so that a checkpoint of 100 GB is read for this only at its first start.
"""

from __future__ import annotations

import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream import user_cache
from slipstream.engine.model_info import DIGITS
from slipstream.errors import FailedPrecondition

WEIGHTS = (".safetensors", ".gguf")
"""Suffixes of weight files. A folder's files of the first one that it has count: no others are loaded."""
THREADS = 8
CHUNK_BYTES = 8 << 20
SETTLED_S = 10.0
"""A digest counts if it was kept so many seconds after the file was written: sooner, the file's next change might have
left its size and time as they were."""


def weights_digest(path: Path) -> str:
    """DIGITS hexadecimal digits of the checkpoint in a folder, or in one file. Raises FailedPrecondition for a file
    that cannot be read."""
    files = weight_files(path)
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(THREADS) as threads:  # hashing lets go of the interpreter's lock
            for file, content in zip(files, threads.map(_file_digest, files), strict=True):
                digest.update(f"{file.name}\0{content}\n".encode())
    except OSError as error:
        raise FailedPrecondition(f"A file of {path} cannot be read: {error}", reason="MODEL_BROKEN") from error
    return digest.hexdigest()[:DIGITS]


def weight_files(path: Path) -> list[Path]:
    """The files that decide the logits, in order of their names."""
    if path.is_file():
        return [path]
    config = [file for file in (path / "config.json",) if file.is_file()]
    for suffix in WEIGHTS:
        if found := sorted(path.glob(f"*{suffix}")):
            return [*config, *found]
    return config


def _file_digest(file: Path) -> str:
    """SHA-256 of the content in hex, from the cache if the file is the one that was hashed."""
    known = file.resolve().stat()
    identity = f"{file.resolve()}\0{known.st_size}\0{known.st_mtime_ns}\0{known.st_ino}\0{known.st_dev}"
    kept = user_cache.cache_file("digests", identity)
    with contextlib.suppress(OSError, ValueError):
        found = kept.read_text()
        settled = kept.stat().st_mtime - known.st_mtime > SETTLED_S
        if settled and len(found) == 64 and int(found, 16) >= 0:
            return found
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    user_cache.keep(kept, digest.hexdigest())
    return digest.hexdigest()
