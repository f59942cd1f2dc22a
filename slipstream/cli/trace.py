"""`slipstream trace`: how the time of one request was spent, from files of traces or from Jaeger."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import explained
from slipstream.errors import NotFound
from slipstream.telemetry.trace_reader import Document, ReadSpan, read_spans, trace_from_folder, trace_from_jaeger

WAIT_S = 0.5
"""Seconds between two looks for a trace."""
WIDE, PIPE_WIDTH = 1000, 240
"""Characters of a line with --wide, and where there is no terminal."""
PICTURE_WIDTH = 150
"""Characters of a line in a picture."""


def trace(
    what: Annotated[
        list[str], typer.Argument(metavar="[export] ID", help="Trace id, as `slipstream generate --trace` printed it.")
    ],
    traces: Annotated[
        Path, typer.Option(envvar="SLIPSTREAM_TRACES", help="Folder that `slipstream serve --traces` writes to.")
    ] = Path("traces"),
    jaeger: Annotated[
        str, typer.Option(envvar="SLIPSTREAM_JAEGER", help="Read from Jaeger at http://HOST:16686 instead.")
    ] = "",
    wait_s: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds to wait for the trace; a collector that samples at the tail takes a minute and more."
        ),
    ] = 5.0,
    wide: Annotated[bool, typer.Option("--wide", help="Cut nothing off, however long lines get.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the waterfall to this file as a picture as well.")] = None,
    rounds: Annotated[str, typer.Option(help="Rounds to show, as FIRST-LAST or one number.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the waterfall's spans as one JSON object; times are Unix nanoseconds.")
    ] = False,
) -> None:
    """Print the trace as a waterfall; with `export` as OTLP JSON, which Jaeger's search page loads."""
    *words, trace_id = what
    if words not in ([], ["export"]) or not re.fullmatch("[0-9a-f]{32}", trace_id):
        raise typer.BadParameter("write `slipstream trace ID` or `slipstream trace export ID`, with 32 digits 0-f.")
    chosen = parse_rounds(rounds)
    if words and chosen is not None:
        raise typer.BadParameter("an export holds the whole trace; --rounds is for the waterfall.")
    with explained("trace"):
        find = partial(trace_from_jaeger, jaeger) if jaeger else partial(trace_from_folder, traces)
        document = _awaited(find, trace_id, wait_s)
        width = WIDE if wide else None
        typer.echo(json.dumps(document)) if words else show(list(read_spans(document)), chosen, svg, as_json, width)


def _awaited(find: Callable[[str], Document], trace_id: str, wait_s: float) -> Document:
    """The trace, once the request's own span is in it, which is sent last; after `wait_s` what there is. Raises what
    `find` raises."""
    until = time.monotonic() + wait_s
    while True:
        over = time.monotonic() >= until
        try:
            document = find(trace_id)
            if over or any(span.kind == "server" for span in read_spans(document)):
                return document
        except NotFound:
            if over:
                raise
        time.sleep(WAIT_S)


def show(
    spans: list[ReadSpan], rounds: range | None, svg: Path | None, as_json: bool, width: int | None = None
) -> None:
    """Prints the spans of these rounds, `width` characters wide (None: the terminal's width), and draws them into
    `svg`. Raises NotFound where there are none."""
    from rich.console import Console

    from slipstream.telemetry.waterfall import shown_spans, waterfall

    if as_json:
        shown = [{"depth": depth} | asdict(span) for depth, span in shown_spans(spans, rounds)]
        typer.echo(json.dumps({"trace_id": spans[0].trace_id, "spans": shown}))
    # A file or a pipe has no width: nothing is cut off there.
    console = Console(highlight=False, width=width or (None if sys.stdout.isatty() else PIPE_WIDTH))
    if not as_json:
        console.print(waterfall(spans, rounds, console.width))
    if svg is not None:
        picture = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), highlight=False)
        picture.print(waterfall(spans, rounds, PICTURE_WIDTH))
        text = picture.export_svg(title="slipstream trace", unique_id="trace")
        # The library's fonts come from a server; a reader's own monospaced one does.
        svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL), "utf-8")


def parse_rounds(text: str) -> range | None:
    """`3-5` -> range(3, 6); an empty text -> None, which is every round."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None and text:
        raise typer.BadParameter(f"{text!r} is no range of rounds; write for example 3-5.")
    chosen = None if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
    if chosen is not None and not chosen:
        raise typer.BadParameter(f"{text!r} ends before it begins; write for example 3-5.")
    return chosen
