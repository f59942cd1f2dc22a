"""Prometheus' own tool, for rules and queries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def problems_of_metrics(page: str) -> set[tuple[str, str]]:
    """What Prometheus' tool finds wrong with a page of metrics, as (metric, problem). A faulty name is no exit of 1."""
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "promtool"), "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        env=os.environ | {"PROMTOOL_REQUIRED": "4"},
        cwd=ROOT,
    )
    if done.returncode == 4 and not os.environ.get("PROMTOOL_REQUIRED"):
        pytest.skip("no promtool")
    assert done.returncode in (0, 3), done.stderr
    found = (line.partition(" ") for line in done.stderr.splitlines())
    return {(name, problem) for name, _, problem in found}


def promtool(*arguments: str) -> str:
    """Its output; fails the test where it finds a fault."""
    environment = os.environ | {"PROMTOOL_REQUIRED": "3"}
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "promtool"), *arguments], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    if done.returncode == 3 and "skipped" in done.stderr and not os.environ.get("PROMTOOL_REQUIRED"):
        pytest.skip("no promtool")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
