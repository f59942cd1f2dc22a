"""`slipstream inflate`: a checkpoint that costs what a big model costs and says what a small one says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import explained

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def inflate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a Llama, Mistral or Qwen checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder for the inflated checkpoint.")],
    parameters: Annotated[str, typer.Option(help="About how many, e.g. 300M or 1.5B.")] = "300M",
    hidden: Annotated[int | None, typer.Option(help="Width: the checkpoint's own times 1, 2, 4, 8 or 16.")] = None,
    layers: Annotated[int | None, typer.Option(help="Depth.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the added random weights.")] = 0,
) -> None:
    """Write a bigger model with the same function, to measure serving with a small trained pair."""
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
    return round(float(match[1]) * UNITS[match[2]])
