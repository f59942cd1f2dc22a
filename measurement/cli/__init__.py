"""Commands of `slipstream` that measure."""

from __future__ import annotations

import typer

from measurement.cli.bench import bench
from measurement.cli.compare import compare_arms
from measurement.cli.doctor import doctor
from slipstream.cli.options import expanded


def add_commands(app: typer.Typer) -> None:
    app.command()(expanded(doctor))
    app.command()(expanded(bench))
    app.command("compare")(expanded(compare_arms))
