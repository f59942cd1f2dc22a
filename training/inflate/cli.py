"""`slipstream inflate`: a model inflated in size."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import AsJson, explained, need_installed

COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def inflate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a Llama, Mistral or Qwen checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder for the inflated checkpoint.")],
    parameters: Annotated[str, typer.Option(help="Approximate size, e.g. 300M or 1.5B.")] = "300M",
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size: the checkpoint's own times 1, 2, 4, 8 or 16.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the added random weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a larger model that computes the same function, to measure serving with a small trained pair."""
    with explained("inflate"):
        need_installed("torch", "transformers")
    from rich.console import Console
    from rich.progress import Progress

    from training.inflate.inflate import inflate as write_inflated
    from training.inflate.proportions import InflateRequest

    console = Console(stderr=True)
    with explained("inflate"):
        request = InflateRequest(parse_count(parameters), hidden, layers, seed)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"inflating {checkpoint.name}")
            shape = write_inflated(
                checkpoint, out, request, lambda done, total: bar.update(task, completed=done, total=total)
            )
    if as_json:
        typer.echo(json.dumps({"out": str(out), "parameters": shape.parameters()} | asdict(shape)))
        return
    console.print(
        f"{out}: {shape.parameters() / 1e6:.0f} M parameters, hidden {shape.hidden}, {shape.layers} layers, "
        f"{shape.heads}/{shape.kv_heads} heads, MLP {shape.feed_forward}",
        soft_wrap=True,
        highlight=False,
    )


def parse_count(text: str) -> int:
    """`300M` -> 300000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of parameters; write for example 300M.")
    return round(float(match[1]) * COUNT_UNITS[match[2]])
