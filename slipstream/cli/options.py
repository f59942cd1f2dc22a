"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Server = Annotated[str, typer.Option(help="HOST:PORT of the gateway.")]
ApiKey = Annotated[
    str, typer.Option(envvar="SLIPSTREAM_API_KEY", help="Opens a gateway that has keys; others see options in `ps`.")
]
Tls = Annotated[bool, typer.Option("--tls", help="The gateway speaks TLS, with a certificate the system trusts.")]
Ca = Annotated[str, typer.Option(envvar="SLIPSTREAM_CA", help="PEM file of the CA that its certificate is of.")]
