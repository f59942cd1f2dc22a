"""`slipstream plan`: the size of a fleet."""

from __future__ import annotations

import subprocess
import sys

import typer

from slipstream.cli.options import explained, need_installed

SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Arguments are passed on."""


def add_commands(app: typer.Typer) -> None:
    app.command("plan", context_settings=SETTINGS)(plan)


def plan(context: typer.Context) -> None:
    """Replicas of each role, latencies and cost for a traffic, against co-located speculation and none."""
    with explained("plan"):
        need_installed("numpy")
    # A process of its own: other commands do not import what it computes with.
    raise typer.Exit(subprocess.run([sys.executable, "-m", "capacity", *context.args], check=False).returncode)
