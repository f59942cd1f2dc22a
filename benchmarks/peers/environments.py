"""What the peers run in, each made on its first use under `.cache/peers`.

- llama.cpp: `llama-server` on PATH, else built for this CPU from the sources in the PyPI package `llama-cpp-python`
  (needs cmake, ninja and a C++ compiler; a quarter of an hour on two cores).
- OpenVINO GenAI: a virtual environment with the PyPI package `openvino-genai`.
- vLLM: the environment that `make setup-vllm` made.
- transformers: this repository's own.

Weights are converted by `benchmarks.peers.export_gguf` with the PyPI package `gguf`. OpenVINO GenAI converts GGUF to
its own format, which a draft model must have, but reads no f32 and no bf16: it gets f16, which holds this pair's bf16
weights up to rounding of the smallest, and so reads half the bytes of the others' f32.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.processes import MODELS, ROOT, inflated
from slipstream.errors import FailedPrecondition
from tools.real_model import RealModelError, real_model

PEERS = ROOT / ".cache" / "peers"
CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    *("-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16"}


def llama_server() -> str:
    """The program. Raises FailedPrecondition where it is not on PATH and the tools to build it are missing."""
    if found := shutil.which("llama-server"):
        return found
    folder = PEERS / "llama_cpp"
    built = folder / "build" / "bin" / "llama-server"
    if not built.exists():
        for tool in ("cmake", "ninja", "c++"):
            if shutil.which(tool) is None:
                raise FailedPrecondition(f"llama.cpp is built with {tool}, which is not installed.")
        folder.mkdir(parents=True, exist_ok=True)
        package = ["llama-cpp-python", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder)]
        _run(sys.executable, "-m", "pip", "download", *package)
        archive = max(folder.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        _run("cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder / "build"), *CMAKE)
        _run("ninja", "-C", str(folder / "build"), "llama-server")
    return str(built)


def openvino_python() -> str:
    """An interpreter with OpenVINO GenAI."""
    folder = PEERS / "openvino"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "openvino-genai")
        (folder / "ready").touch()
    return str(python)


def checkpoint(target: str) -> Path:
    """The folder of the `draft` or of the target: `shipped`, `inflated` (to 300 M parameters), a number of parameters
    to which it is inflated, or `smollm2`, which is downloaded and converted. Raises FailedPrecondition where it cannot
    be had."""
    if target == "smollm2":
        try:
            return real_model()
        except RealModelError as error:
            raise FailedPrecondition(str(error)) from error
    kept = {"shipped": MODELS / "target", "draft": MODELS / "draft"}
    return kept.get(target) or inflated("300M" if target == "inflated" else target)


def gguf(model: str, kind: str) -> Path:
    """A model in GGUF of this type: f32, bf16 or f16."""
    file = PEERS / "models" / f"{model}-{kind}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        packages = PEERS / "gguf"
        if not packages.exists():
            _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), "gguf")
        path = os.pathsep.join([str(ROOT), str(packages)])
        command = [sys.executable, "-m", "benchmarks.peers.export_gguf", str(checkpoint(model)), str(file), kind]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    return file


def openvino_model(model: str) -> Path:
    """The folder of a model in OpenVINO's format, made by OpenVINO GenAI from GGUF."""
    folder = PEERS / "models" / f"{model}-openvino"
    if not (folder / "openvino_detokenizer.xml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / "model.gguf"  # what is made lies beside what it is made of
        copy.unlink(missing_ok=True)
        copy.hardlink_to(gguf(model, "f16"))
        save = f"import openvino_genai as g; g.LLMPipeline({str(copy)!r}, 'CPU', enable_save_ov_model=True)"
        _run(openvino_python(), "-c", save)
    return folder


def _run(*command: str) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True)
