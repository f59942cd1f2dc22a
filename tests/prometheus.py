"""Prometheus' own tool, for rules and queries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
