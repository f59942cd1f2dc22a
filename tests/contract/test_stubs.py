"""The stubs that are checked in are those the contract generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generate(out: Path, protos: list[Path], *outputs: str) -> None:
    options = [f"--{output}={out}" for output in outputs]
    names = [str(proto) for proto in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *options, *names]
    subprocess.run(command, check=True, timeout=60)


def test_generated_stubs_equal_the_checked_in_ones(tmp_path: Path) -> None:
    protos = sorted((ROOT / "protos/slipstream/v1").glob("*.proto"))
    services = [proto for proto in protos if "\nservice " in proto.read_text()]
    generate(tmp_path, protos, "python_out", "pyi_out")
    generate(tmp_path, services, "grpc_python_out")
    generated = {path.name: path.read_text() for path in (tmp_path / "slipstream/v1").iterdir()}
    stubs = (ROOT / "slipstream/v1").glob("*_pb2*")
    assert generated == {path.name: path.read_text() for path in stubs}


def test_every_rpc_states_its_status_codes() -> None:
    for proto in (ROOT / "protos/slipstream/v1").glob("*.proto"):
        comment: list[str] = []
        for line in map(str.strip, proto.read_text().splitlines()):
            if line.startswith("rpc "):
                assert any("Status codes" in text for text in comment), f"{proto.name}: {line}"
            comment = [*comment, line] if line.startswith("//") else []
