"""`slipstream key`: API keys of a gateway."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from slipstream.cli.options import AsJson
from slipstream.client.gateway_endpoint import KEY_NAME, digest, new_key

LIMITS = "Limits"
"""Group of options in `--help`."""


@dataclass(frozen=True)
class KeyLimits:
    """Options of `key`, with the names that they have in the file of keys."""

    sessions: Annotated[int | None, typer.Option(help="Most sessions at once.", min=1, rich_help_panel=LIMITS)] = None
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Most requests in a minute.", min=1, rich_help_panel=LIMITS)
    ] = None
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Most prompt and output tokens in a minute.", min=1, rich_help_panel=LIMITS)
    ] = None
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one prompt.", min=1, rich_help_panel=LIMITS)
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one output.", min=1, rich_help_panel=LIMITS)
    ] = None
    least_priority: Annotated[
        int | None, typer.Option(help="Lowest priority value that a request may have.", rich_help_panel=LIMITS)
    ] = None


def key(
    *,
    name: Annotated[str, typer.Argument(help="Name of the key and its tenant: letters, digits, _ and -.")],
    limits: KeyLimits,
    operator: Annotated[
        bool, typer.Option("--operator", help="The key may also call what concerns all tenants.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create an API key. Prints a line for the file of GATEWAY_API_KEYS, and the key itself on standard error.

    The key is stored nowhere; the line holds only its hash.
    """
    if not KEY_NAME.fullmatch(name):
        raise typer.BadParameter("a name has 1 to 64 letters, digits, _ and -.")
    created = new_key()
    fields = asdict(limits) | {"operator": "true" if operator else None}
    given = "".join(f", {field} = {value}" for field, value in fields.items() if value is not None)
    line = f'{name} = {{ sha256 = "{digest(created).hex()}"{given} }}'
    if as_json:
        typer.echo(json.dumps({"name": name, "key": created, "line": line}))
        return
    typer.echo(line)
    typer.echo(created, err=True)
