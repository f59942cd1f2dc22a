"""`slipstream key`: an API key, and the line that makes a gateway know it."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.client.api_key import KEY_NAME, digest, new_key


def key(
    name: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, _ and -.")],
    sessions: Annotated[int | None, typer.Option(help="Most sessions at once.", min=1)] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Of every kind.", min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Prompt and output.", min=1)] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Most of one prompt.", min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most of one output.", min=1)] = None,
    least_priority: Annotated[int | None, typer.Option(help="Lowest priority it may claim.")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="It may ask for what concerns all.")] = False,
) -> None:
    """Print a line for the file of GATEWAY_API_KEYS, and on standard error the key, which is kept nowhere."""
    if not KEY_NAME.fullmatch(name):
        raise typer.BadParameter("a name has 1 to 64 letters, digits, _ and -.")
    made = new_key()
    limits = {
        "sessions": sessions,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "least_priority": least_priority,
        "operator": "true" if operator else None,
    }
    given = "".join(f", {limit} = {value}" for limit, value in limits.items() if value is not None)
    typer.echo(f'{name} = {{ sha256 = "{digest(made).hex()}"{given} }}')
    typer.echo(made, err=True)
