"""The user's cache: small results that are kept between starts (digests of weights, trials that passed), and converted
models. Where nothing may be written, as in a container with a read-only root, small results are computed anew."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`slipstream/KIND` in XDG_CACHE_HOME, which is `~/.cache` where it is not set; it may not be there."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "slipstream" / kind


def cache_file(kind: str, question: str) -> Path:
    """The file of the result that answers `question`, a text of any length; it may not be there."""
    return cache_folder(kind) / hashlib.sha256(question.encode()).hexdigest()


def keep(file: Path, text: str) -> None:
    """Write the file whole, or not at all: other processes read it meanwhile."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f"{file.name}.{os.getpid()}")
        written.write_text(text)
        os.replace(written, file)
