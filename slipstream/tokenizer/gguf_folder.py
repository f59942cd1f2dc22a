"""A model in a GGUF file is served from a Hugging Face folder that it is converted to once.

Every role wants other parts of a model: the gateway its tokenizer and chat template without torch, the verifier its
weights, heads its embeddings. A folder has all of them where everything here looks for them, and reading the file again
for each role and each start would take minutes for a large model. So the folder lies in the user's cache, under the
digest of the file's content: equal files share one, and a changed file gets another.

The conversion needs torch, transformers and gguf, and as much memory as the model has weights. It runs in a process of
its own (`slipstream.engine.models.gguf_conversion`), so a gateway never imports them and no role keeps that memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from slipstream.errors import FailedPrecondition, Internal, NotFound, from_code
from slipstream.user_cache import cache_folder

SUFFIX = ".gguf"
CACHE = "gguf"
"""Kind of what lies in the user's cache."""
CONVERSION = "slipstream.engine.models.gguf_conversion"
"""The module that converts, by name: this package imports no torch."""
FORMAT = 1
"""Counts changes of what a conversion writes: folders of another one are not used again."""
REFUSED = 3
"""Exit status of a conversion that printed a typed error."""


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file, which may be missing."""
    return name.lower().endswith(SUFFIX) and not Path(name).expanduser().is_dir()


def gguf_folder(name: str) -> Path:
    """The folder with the converted model; converts it where that was not done before, which takes as long as reading
    the file once and writing twice to four times its bytes.

    Raises NotFound for a missing file, FailedPrecondition for one that cannot be read or converted here, or for a cache
    that cannot be written, ResourceExhausted for a disk without room.
    """
    file = Path(name).expanduser()
    if not file.is_file():
        raise NotFound(f"There is no file {name}; give a GGUF file, a checkpoint's folder or a hub id.",
                       reason="MODEL_MISSING")  # fmt: skip
    found = file.stat()
    folder = (
        cache_folder(CACHE) / f"{_content(file.resolve(), found.st_size, found.st_mtime_ns)[:24]}-{FORMAT}" / file.stem
    )
    if not folder.is_dir():
        _convert_once(file, folder)
    return folder


@lru_cache(maxsize=64)
def _content(file: Path, size: int, modified_ns: int) -> str:
    """SHA-256 of the file in hex; read again only where size or time of change differ."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _convert_once(file: Path, folder: Path) -> None:
    """Processes that want the same folder wait for the first of them; it appears by one rename."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / "lock"):
            if folder.is_dir():
                return
            with tempfile.TemporaryDirectory(prefix="part-", dir=folder.parent) as part:
                print(f"slipstream: converting {file.name}, once, to {folder}", file=sys.stderr, flush=True)
                convert(file, Path(part) / "made")
                (Path(part) / "made").rename(folder)
    except OSError as error:
        raise FailedPrecondition(
            f"{file.name} cannot be converted to {folder}: {error}. Set XDG_CACHE_HOME to a folder that can be "
            "written, or convert it with `slipstream convert` and name the folder.",
            reason="CACHE_UNWRITABLE",
        ) from error


def convert(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file to a folder that does not exist, in a process of its own. Raises what that
    process refuses."""
    command = [sys.executable, "-m", CONVERSION, str(file), str(folder)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    if ended.returncode == REFUSED:
        refusal = json.loads(ended.stdout.splitlines()[-1])
        raise from_code(refusal["code"], refusal["message"], refusal["reason"])
    if ended.returncode:
        raise Internal(
            f"the conversion of {file.name} ended with status {ended.returncode}; its error is above. A status of -9 "
            "is the system's lack of memory: convert it elsewhere with `slipstream convert` and name the folder.",
            reason="CONVERSION_FAILED",
        )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
