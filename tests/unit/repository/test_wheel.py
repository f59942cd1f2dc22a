"""The wheel works without the repository beside it: its command, and the models that it brings."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipstream.errors import NotFound
from slipstream.tokenizer import vocabulary
from tools.lock import closure
from tools.wheel import build

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("slipstream", "gateway", "drafter_svc", "verifier_svc", "capacity", "measurement", "training")
RESOLVED = """
import sys, slipstream
from slipstream.tokenizer.vocabulary import eos_token_ids, fingerprint, load_tokenizer, shipped_model
print(slipstream.__file__)
for role in ("target", "draft"):
    folder = shipped_model(role)
    print(folder, fingerprint(load_tokenizer(folder)), *eos_token_ids(folder))
"""
LOADED = """
import sys
before = set(sys.modules)
import slipstream
slipstream.Client, slipstream.AsyncClient
assert not {"typer", "rich"} & set(sys.modules)  # which are the command's
import slipstream.cli.commands
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
CLIENT = {"grpcio", "grpcio-status", "protobuf", "typer", "rich"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is unpacked, which is what installing it does. Its kernels are compiled as fast as
    can be, since nothing here computes with them."""
    folder = tmp_path_factory.mktemp("installed")
    compiler = tmp_path_factory.mktemp("compiler") / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(compiler))
        wheel = build(tmp_path_factory.mktemp("wheel"), "--no-build-isolation")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed: Path, *command: str) -> str:
    """What the command prints, run from a folder outside of the repository with the installed packages first."""
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_command_starts(installed: Path) -> None:
    [entry_points] = installed.glob("*.dist-info/entry_points.txt")
    assert "slipstream = slipstream.cli.commands:app" in entry_points.read_text()
    printed = run(installed, sys.executable, "-m", "slipstream", "serve", "--help")
    assert "--target" in printed and "--draft" in printed


def test_a_client_needs_and_loads_nothing_of_the_services(installed: Path) -> None:
    [metadata] = installed.glob("*.dist-info/METADATA")
    lines = [line.split(":", 1)[1] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist:")]
    base = [each for each in map(Requirement, lines) if each.marker is None or "extra" not in str(each.marker)]
    assert {each.name for each in base} == CLIENT
    allowed = set(closure(base)) | {"slipstream-serve", "grpcio-health-checking", "grpcio-reflection", "grpcio-tools"}
    owners = packages_distributions()
    loaded = run(installed, sys.executable, "-c", LOADED).split()
    found = {module: {canonicalize_name(each) for each in owners.get(module, ())} for module in loaded}
    # grpc itself loads those packages beside it that are there, to offer them under its own name.
    assert {module for module, names in found.items() if names and not names & allowed} == set()
    assert {"grpc", "typer"} <= found.keys()


def test_the_default_models_are_in_the_wheel(installed: Path) -> None:
    package, target, draft = run(installed, sys.executable, "-c", RESOLVED).splitlines()
    assert Path(package).is_relative_to(installed)
    for line, role in ((target, "target"), (draft, "draft")):
        folder, *told = line.split()
        assert Path(folder) == installed / "slipstream" / "models" / role
        ours = str(ROOT / "models" / role)
        ends = map(str, vocabulary.eos_token_ids(ours))
        assert told == [vocabulary.fingerprint(vocabulary.load_tokenizer(ours)), *ends]
        for file in (ROOT / "models" / role).iterdir():
            assert (Path(folder) / file.name).read_bytes() == file.read_bytes()


def test_files_that_only_services_read_are_in_the_wheel(installed: Path) -> None:
    missing = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".lua", ".typed", ".html", ".css", ".js", ".svg")
        and not (installed / path.relative_to(ROOT)).is_file()
    ]
    assert missing == []


def test_an_installation_without_models_asks_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vocabulary, "SHIPPED", tmp_path / "models")
    with pytest.raises(NotFound, match="--target") as caught:
        vocabulary.shipped_model("target")
    assert caught.value.reason == "MODEL_MISSING"
