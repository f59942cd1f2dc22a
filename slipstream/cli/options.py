"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from slipstream.errors import SlipstreamError

LOCAL = "127.0.0.1:50051"
Server = Annotated[str, typer.Option(help="HOST:PORT of the gateway.")]
Servers = Annotated[
    list[str] | None,
    typer.Option("--server", help="HOST:PORT of a gateway; may be given again, to go on where one fails."),
]
ApiKey = Annotated[
    str, typer.Option(envvar="SLIPSTREAM_API_KEY", help="Opens a gateway that has keys; others see options in `ps`.")
]
Tls = Annotated[bool, typer.Option("--tls", help="The gateway speaks TLS, with a certificate the system trusts.")]
Ca = Annotated[str, typer.Option(envvar="SLIPSTREAM_CA", help="PEM file of the CA that its certificate is of.")]


@contextmanager
def explained(command: str) -> Iterator[None]:
    """A typed error ends the command with one sentence, its reason and exit status 1."""
    try:
        yield
    except SlipstreamError as error:
        typer.echo(f"slipstream {command}: {error.message} [{error.reason}]", err=True)
        raise typer.Exit(1) from error
