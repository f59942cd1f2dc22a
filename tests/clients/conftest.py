"""`slipstream serve` of the shipped pair, for clients that nobody here wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.environments import ROOT

REQUIRED = "CLIENTS_REQUIRED"
"""Set to 1 by `make test-clients`: environments are made and every client runs. Else all are left out, visibly."""


@dataclass(frozen=True)
class Served:
    grpc: str
    """HOST:PORT."""
    http: str
    """HOST:PORT."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(REQUIRED) == "1":
        return
    left_out = pytest.mark.skip(reason=f"{REQUIRED} is not set; `make test-clients` runs these")
    for item in items:
        if Path(__file__).parent in item.path.parents and "environment" in item.fixturenames:
            item.add_marker(left_out)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    command = [sys.executable, "-m", "slipstream", "serve", "--json"]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--served-model-name", "alias"]
    command += ["--chat-template", str(Path(__file__).parent / "chat.jinja")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield Served(ready["grpc"], ready["http"])
        process.terminate()
        process.wait(60)
