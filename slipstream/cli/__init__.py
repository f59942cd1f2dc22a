"""The `slipstream` command: one file for each subcommand."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from slipstream.cli.bench import bench
from slipstream.cli.compare import compare_arms
from slipstream.cli.doctor import doctor
from slipstream.cli.generate import generate
from slipstream.cli.inflate import inflate
from slipstream.cli.key import key
from slipstream.cli.plan import SETTINGS, plan
from slipstream.cli.serve import serve
from slipstream.cli.session import cancel_session, resume_session, roll_back_session
from slipstream.cli.status import status
from slipstream.cli.trace import trace
from slipstream.cli.train import train

ABOUT = "Distributed speculative decoding: cheap GPUs guess, one expensive GPU decides."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)
for command in (serve, generate, status, doctor, key, trace, bench, train, inflate):
    app.command()(command)
app.command("resume")(resume_session)
app.command("rollback")(roll_back_session)
app.command("cancel")(cancel_session)
app.command("compare")(compare_arms)
app.command("plan", context_settings=SETTINGS)(plan)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(metadata.version("slipstream-serve"))
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """For options that belong to no command."""
