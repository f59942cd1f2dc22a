"""The `slipstream` command: one file for each group of subcommands. Imports the library and no service.

Other packages add commands by entry points of the group COMMANDS, as `training` does: a function, or a `typer.Typer`
with subcommands of its own.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from slipstream.cli.bench import bench
from slipstream.cli.chat import chat
from slipstream.cli.generate import cancel_session, generate, resume_session, roll_back_session
from slipstream.cli.measurements import PLAN_SETTINGS, compare_arms, plan
from slipstream.cli.models import convert
from slipstream.cli.operations import doctor, key
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
for command in (serve, generate, chat, status, doctor, key, trace, bench, convert):
    app.command()(expanded(command))
for entry in entry_points(group=COMMANDS):
    if isinstance(added := entry.load(), typer.Typer):
        app.add_typer(added, name=entry.name)
    else:
        app.command(entry.name)(expanded(added))
app.command("resume")(expanded(resume_session))
app.command("rollback")(expanded(roll_back_session))
app.command("cancel")(expanded(cancel_session))
app.command("compare")(expanded(compare_arms))
app.command("plan", context_settings=PLAN_SETTINGS)(plan)


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
