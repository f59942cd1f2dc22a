"""`slipstream trace`: where the time of one request went, from files of traces or from Jaeger."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import explained
from slipstream.telemetry.trace_reader import ReadSpan, from_folder, from_jaeger_at, to_jaeger


def trace(
    what: Annotated[list[str], typer.Argument(metavar="[export] ID", help="`slipstream generate --trace` tells it.")],
    traces: Annotated[Path, typer.Option(help="Folder that `slipstream serve --traces` writes to.")] = Path("traces"),
    jaeger: Annotated[str, typer.Option(help="Ask a Jaeger instead, at http://HOST:16686.")] = "",
    rounds: Annotated[str, typer.Option(help="Only these, as FIRST-LAST or one number.")] = "",
) -> None:
    """Print the trace's waterfall; with `export` its JSON, for the upload tab of Jaeger's search page."""
    *words, trace_id = what
    if words not in ([], ["export"]) or not re.fullmatch("[0-9a-f]{32}", trace_id):
        raise typer.BadParameter("write `slipstream trace ID` or `slipstream trace export ID`, with 32 digits 0-f.")
    chosen = parse_rounds(rounds)
    if words and chosen is not None:
        raise typer.BadParameter("an export holds the whole trace; --rounds is for the waterfall.")
    with explained("trace"):
        spans = from_jaeger_at(jaeger, trace_id) if jaeger else from_folder(traces, trace_id)
        typer.echo(json.dumps(to_jaeger(spans))) if words else show(spans, chosen)


def show(spans: list[ReadSpan], rounds: range | None) -> None:
    from rich.console import Console

    from slipstream.telemetry.waterfall import waterfall

    # A file or a pipe has no width: nothing is cut off there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    console.print(waterfall(spans, rounds, console.width))


def parse_rounds(text: str) -> range | None:
    """`3-5` -> 3, 4, 5; nothing: all."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None and text:
        raise typer.BadParameter(f"{text!r} is no range of rounds; write for example 3-5.")
    chosen = None if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
    if chosen is not None and not chosen:
        raise typer.BadParameter(f"{text!r} ends before it begins; write for example 3-5.")
    return chosen
