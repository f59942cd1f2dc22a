"""Each command line of docs/ that runs on one machine with CPUs runs here as it stands there, to its end. Those that
cannot are listed with the reason, and a new one is run or listed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from tests.unit.repository.test_document_commands import DOCUMENTS

HERE = {
    "BIG": {"BIG": str(ROOT / "models" / "draft"), "--device cuda": "--device cpu"},
    "MODEL": {"DRAFT_MODEL": str(ROOT / "models" / "draft")},
}
"""What stands in a document for something of its reader's, and what this machine has."""
FOLDERS = {
    ".cache/smollm2": str(ROOT / "models" / "target"),
    "models/": f"{ROOT / 'models'}/",
    "examples/": f"{ROOT / 'examples'}/",
}
QUICK, LONG, SLOW = (), pytest.mark.long, pytest.mark.slow
RUN: Mapping[str, pytest.MarkDecorator | tuple[()]] = {
    "slipstream plan examples/plan/h100-l4.toml": SLOW,
    "slipstream plan examples/plan/h100-l4.toml --concurrency 500": SLOW,
    "slipstream plan examples/plan/h100-l4.toml --delay-ms 5 --acceptance 0.6 --rate 200 --tpot-p95-ms 20": SLOW,
    "slipstream plan --measure BIG --device cuda > target.json": SLOW,
    "slipstream plan --gpus DRAFT_MODEL": LONG,
    "slipstream key alice >> api-keys": QUICK,
    "slipstream doctor --target .cache/smollm2 --drafter suffix --max-tokens 32": SLOW,
    "slipstream doctor --target models/target --draft models/draft --prompts prompts.txt": SLOW,
    "slipstream doctor --target models/target --draft models/eagle --drafter eagle --prompts prompts.txt": SLOW,
    "slipstream train eagle --target .cache/smollm2 --data prompts.txt --out smollm2-eagle --dry-run": SLOW,
    "slipstream bench prompts.txt --max-tokens 64 --html report.html": SLOW,
    "slipstream bench prompts.txt --max-tokens 64 --concurrency 4 --repeats 5": SLOW,
    "slipstream bench prompts.txt --concurrency 2 --max-tokens 64 --temperature 0.7 --repeats 3": SLOW,
}
"""Commands, and their marks: slow are those that compute for more than ten seconds."""
ELSEWHERE = {
    "slipstream train eagle --target .cache/smollm2 --data prompts.txt --out smollm2-eagle --minutes 240": "four hours",
    "slipstream compare --verifier-price 2.5 --drafter-price 0.4": "test_experiment.py, behind a server with arms",
    "slipstream trace ID --jaeger http://localhost:16686": "a Jaeger; tests/manifests has one",
    "slipstream trace ID --jaeger http://127.0.0.1:16686": "a Jaeger; tests/manifests has one",
    "slipstream generate 'def read(self, path):' --server 127.0.0.1:50051": "a cluster",
    "slipstream generate 'def read(self, path):' --server 127.0.0.1:50051 --trace": "a cluster",
    "slipstream plan --measured-at HOST:PORT > target.json": "a verifier alone: test_capacity_plan.py",
    "slipstream status --server 10.0.0.3:50051": "three machines",
    "slipstream serve --engine vllm --target FOLDER": "make test-vllm",
    "slipstream generate 'def read(self, path):' --trace": "below",
    "slipstream trace ID": "below",
    "slipstream trace export ID > trace.json": "below",
}
"""Commands that run in no test of this file, and what they need or where they run."""
SERVING = re.compile(r"slipstream serve\b")
"""Its options are those of the tests' own servers (tests/e2e); it has no end of its own."""


def lines_of(document: Path) -> list[str]:
    """The command lines of a document, without comments."""
    text = "\n".join(re.findall(r"```sh\n(.*?)```", document.read_text("utf-8"), re.DOTALL)).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in text.splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if re.match(r"(?:[A-Z_]+=\S+ )*slipstream [a-z]", line)]


def run(command: list[str], folder: Path, timeout_s: float = 120, most: int = 0) -> str:
    """`most`: highest exit status that is an answer."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode <= most, done.stderr
    return done.stdout + done.stderr


def blocks(name: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "docs" / name).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )


def test_every_command_line_is_run_or_listed_with_its_reason() -> None:
    """The README's own run in test_readme.py."""
    found = {line for each in DOCUMENTS if each.name != "README.md" for line in lines_of(each)}
    assert len(found) > 15
    assert {line for line in found if not SERVING.search(line)} - {*RUN, *ELSEWHERE} == set()
    assert {*RUN, *ELSEWHERE} - found == set(), "no document has these any more"


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=mark) for each, mark in RUN.items()],
)
def test_a_command_of_the_documents_runs_to_its_end(command: str, servers: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def read(self, path):\ndef write(self, path, text):\n" * 4)
    line = command
    for name, mine in (pair for each in HERE.values() for pair in each.items()):
        line = line.replace(name, mine)
    for name, mine in FOLDERS.items():
        line = re.sub(rf"(?<=\s){re.escape(name)}", mine, line)
    if line.startswith("slipstream bench"):
        line += f" --server {servers[0]}"
    if line.startswith("slipstream plan /"):
        line += " --quick"  # without it some minutes
    # A doctor says with 3 that a pair works and does not pay.
    printed = run(["bash", "-c", line], tmp_path, 550, most=3 if " doctor " in line else 0)
    written = re.search(r">\s*(\S+)$", line) or re.search(r"--html (\S+)", line)
    assert (tmp_path / written[1]).read_text("utf-8").strip() if written else printed.strip()


def test_openais_client_of_the_page_prints_a_text(servers: tuple[str, str], tmp_path: Path) -> None:
    (code,) = blocks("http.md", "python")
    assert "http://127.0.0.1:8000/v1" in code
    assert run([sys.executable, "-c", code.replace("127.0.0.1:8000", servers[1])], tmp_path).strip()


def test_prompts_of_the_page_of_experiments_are_written(tmp_path: Path) -> None:
    (block,) = (each for each in blocks("experiments.md", "sh") if "held_out" in each)
    command = block[: block.index("prompts.txt\n") + len("prompts.txt\n")]
    run(["bash", "-c", command.replace("python -c", f"{sys.executable} -c")], tmp_path)
    assert len((tmp_path / "prompts.txt").read_text("utf-8").splitlines()) == 100


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
