"""An environment for each client under .cache/clients, with the versions that are named here: made once, and again
where the names changed. Nothing of it touches the project's own environment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "clients"
PROGRAMS = Path(__file__).parent / "programs"
PROTOS = ROOT / "protos"
BUILD_S = 1800.0
"""Seconds that one environment may take: Rust's and Java's compile everything."""
RUN_S = 300.0
"""Seconds that a client may take for all that it does."""

PYTHON: Mapping[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0",),
    "anthropic": ("anthropic==2.14.0",),
    "langchain": ("langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
    "litellm": ("litellm==1.110.2",),
    "instructor": ("instructor==1.17.0",),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "openai-agents": ("openai-agents==0.24.0",),
    "llama-index": ("llama-index-llms-openai-like==0.8.1",),
    "haystack": ("haystack-ai==3.4.1",),
    "semantic-kernel": ("semantic-kernel==1.45.0",),
    "llm": ("llm==0.36",),
    "aider": ("aider-chat==0.86.2",),
    "litellm-proxy": ("litellm[proxy]==1.106.12",),  # parts of the proxies behind it are not on the index
    "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.24.0"),
}
"""Packages of each Python client; the program of the same name runs it."""
NPM: Mapping[str, Mapping[str, str]] = {
    "openai-js": {"openai": "7.55.0", "zod": "4.6.7"},
    "anthropic-js": {"@anthropic-ai/sdk": "1.10.0"},
    "vercel-ai": {
        "ai": "7.0.173",
        "@ai-sdk/openai": "4.0.118",
        "@ai-sdk/openai-compatible": "3.0.92",
        "@ai-sdk/anthropic": "4.0.105",
        "zod": "4.6.7",
    },
    "grpc-js": {
        "@grpc/grpc-js": "1.14.7",
        "@grpc/proto-loader": "0.8.1",
        "@grpc/reflection": "1.0.4",
        "google-proto-files": "6.0.1",
        "grpc-health-check": "2.1.0",
    },
}
LANGUAGES = ("go", "rust", "java")
"""Clients of the protos, in `examples/`."""
CLIENTS = (*PYTHON, *NPM, *LANGUAGES)
SHORT = ("openai", "anthropic", "langchain", "vercel-ai", "lm-eval")
"""What CI runs for every change: most applications stand on these."""
GO_PLUGINS = (
    "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.9",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1",
)


class ClientFailed(Exception):
    """A client, or what makes its environment, ended with an error; the message holds what it wrote."""


@dataclass(frozen=True)
class Environment:
    command: tuple[str, ...]
    """Runs the client; the address follows."""
    folder: Path

    def run(self, *arguments: str) -> str:
        """What the client writes. Raises ClientFailed where it ends with an error."""
        return _run([*self.command, *arguments], self.folder, {}, RUN_S)


def python(name: str) -> Environment:
    folder = FOLDER / name

    def make() -> None:
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile", *PYTHON[name]])

    _made(folder, PYTHON[name], make)
    program = PROGRAMS / f"{name.replace('-', '_')}_client.py"
    return Environment((str(folder / "bin" / "python"), str(program)), folder)


def node(name: str) -> Environment:
    folder = FOLDER / name

    def make() -> None:
        folder.mkdir(parents=True)
        package = {"private": True, "type": "module", "dependencies": NPM[name]}
        (folder / "package.json").write_text(json.dumps(package))
        _run(["npm", "install", "--no-audit", "--no-fund", "--silent"], folder)

    _made(folder, sorted(NPM[name].items()), make)
    program = folder / "client.mjs"  # beside the packages: that is where it looks for them
    shutil.copyfile(PROGRAMS / f"{name.replace('-', '_')}_client.mjs", program)
    return Environment(("node", str(program)), folder)


def go() -> Environment:
    folder = FOLDER / "go"
    more = {
        name: str(folder / part) for name, part in (("GOMODCACHE", "modules"), ("GOCACHE", "built"), ("GOBIN", "bin"))
    }
    package = "example.com/client/slipstreamv1"

    def make() -> None:
        shutil.copytree(ROOT / "examples" / "go", folder)
        for plugin in GO_PLUGINS:
            _run(["go", "install", plugin], folder, more)
        stubs = [f"--{kind}_out=." for kind in ("go", "go-grpc")]
        for kind in ("go", "go-grpc"):
            stubs += [f"--{kind}_opt=module=example.com/client"]
            stubs += [f"--{kind}_opt=Mslipstream/v1/{file}.proto={package}" for file in ("types", "gateway")]
        path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        _run([*_protoc(), f"-I{PROTOS}", *stubs, *_files()], folder, path)
        _run(["go", "build", "-mod=readonly", "-o", "client", "."], folder, more)

    _made(folder, [_sources("go"), *GO_PLUGINS], make, keep=("modules", "built"))
    return Environment((str(folder / "client"),), folder)


def rust() -> Environment:
    folder = FOLDER / "rust"

    def make() -> None:
        shutil.copytree(ROOT / "examples" / "rust", folder)
        protoc = folder / "protoc"
        protoc.write_text(f'#!/bin/sh\nexec {" ".join(_protoc())} "$@"\n')
        protoc.chmod(0o755)
        more = {"CARGO_HOME": str(folder / "home"), "PROTOC": str(protoc), "SLIPSTREAM_PROTOS": str(PROTOS)}
        _run(["cargo", "build", "--quiet", "--locked"], folder, more)

    _made(folder, [_sources("rust")], make)
    return Environment((str(folder / "target" / "debug" / "client"),), folder)


def java() -> Environment:
    folder = FOLDER / "java"

    def make() -> None:
        shutil.copytree(ROOT / "examples" / "java", folder)
        _run(
            ["mvn", "-q", "-B", f"-Dmaven.repo.local={folder / 'repository'}", f"-Dprotos={PROTOS}", "package"], folder
        )

    _made(folder, [_sources("java")], make)
    classes = f"{folder / 'target' / 'client-1.jar'}:{folder / 'target' / 'dependency'}/*"
    return Environment(("java", "-cp", classes, "client.Client"), folder)


def _made(folder: Path, wanted: Sequence[object], make: Callable[[], None], keep: Sequence[str] = ()) -> None:
    """Calls `make` unless the folder is of what is wanted. `keep`: parts of it that Go write-protects."""
    mark = hashlib.sha256(repr(wanted).encode()).hexdigest()
    ready = folder / ".ready"
    if ready.exists() and ready.read_text() == mark:
        return
    for part in keep:
        if (folder / part).exists():
            _run(["chmod", "-R", "u+w", str(folder / part)])
    shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    make()
    ready.write_text(mark)


def _sources(name: str) -> str:
    """A digest of an example and the protos."""
    paths = [*(ROOT / "examples" / name).rglob("*"), *PROTOS.rglob("*.proto")]
    found = b"".join(path.read_bytes() for path in sorted(paths) if path.is_file())
    return hashlib.sha256(found).hexdigest()


def _protoc() -> list[str]:
    return [sys.executable, "-m", "grpc_tools.protoc"]


def _files() -> list[str]:
    """The files that an application needs."""
    return [str(PROTOS / "slipstream" / "v1" / f"{name}.proto") for name in ("types", "gateway")]


def _run(
    command: Sequence[str], folder: Path | None = None, more: Mapping[str, str] | None = None, limit_s: float = BUILD_S
) -> str:
    """Raises ClientFailed for a program that is missing, fails or takes too long."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=outside | dict(more or {}),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClientFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        raise ClientFailed(
            f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-6000:]}"
        )
    return done.stdout
