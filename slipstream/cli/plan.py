"""`slipstream plan`: how many verifiers and drafters a traffic needs, and what they cost."""

from __future__ import annotations

import subprocess
import sys

import typer

SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def plan(context: typer.Context) -> None:
    """Replicas of each role, latencies and cost for a traffic, against co-located speculation and none."""
    # A module of its own, as the roles are: it runs the verifier's rules, and what is shared imports no service.
    raise typer.Exit(subprocess.run([sys.executable, "-m", "capacity", *context.args], check=False).returncode)
