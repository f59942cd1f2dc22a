"""The commands of docs/http.md and docs/tracing.md that ask a running system, as they stand there, to their end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import ROOT


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def blocks(name: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "docs" / name).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )


def test_openais_client_of_the_page_prints_a_text(servers: tuple[str, str], tmp_path: Path) -> None:
    (code,) = blocks("http.md", "python")
    assert "http://127.0.0.1:8000/v1" in code
    assert run([sys.executable, "-c", code.replace("127.0.0.1:8000", servers[1])], tmp_path).strip()


def test_a_request_is_traced_and_its_trace_read_and_exported(
    servers: tuple[str, str], traces: Path, tmp_path: Path
) -> None:
    (block,) = (each for each in blocks("tracing.md", "sh") if "slipstream serve --traces traces" in each)
    (tmp_path / "traces").symlink_to(traces)
    lines = [line.split("  #")[0].strip() for line in block.splitlines()]
    (asked,) = (line for line in lines if line.startswith("slipstream generate"))
    printed = run(["bash", "-c", f"{asked} --max-tokens 8 --server {servers[0]}"], tmp_path)
    found = re.search(r"slipstream trace ([0-9a-f]{32})", printed)
    assert found is not None
    reading = [line for line in lines if " ID" in line and "--jaeger" not in line]
    assert len(reading) == 2
    for line in reading:
        printed = run(["bash", "-c", line.replace("ID", f"{found[1]} --wait-s 30")], tmp_path)
        assert ("round" in printed) is (">" not in line)
    assert "resourceSpans" in (tmp_path / "trace.json").read_text("utf-8")
