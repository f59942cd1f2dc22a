"""The `slipstream` command: one file for each group of subcommands. Imports the library and no service.

Other packages add theirs by entry points of the group COMMANDS: functions that take the `typer.Typer`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from slipstream.cli.chat import chat
from slipstream.cli.convert import convert
from slipstream.cli.generate import cancel_session, generate, resume_session, roll_back_session
from slipstream.cli.key import key
from slipstream.cli.options import expanded
from slipstream.cli.serve import serve
from slipstream.cli.status import status
from slipstream.cli.trace import trace
from slipstream.version import running_version

COMMANDS = "slipstream.commands"
ABOUT = "Distributed speculative decoding: cheap GPUs guess, one expensive GPU decides."

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help=ABOUT,
)
for command in (serve, generate, chat, status, key, trace, convert):
    app.command()(expanded(command))
app.command("resume")(expanded(resume_session))
app.command("rollback")(expanded(roll_back_session))
app.command("cancel")(expanded(cancel_session))
for others in entry_points(group=COMMANDS):
    others.load()(app)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(running_version())
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of `slipstream` itself."""
