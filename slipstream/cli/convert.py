"""`slipstream convert`: a GGUF file as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import AsJson, explained, need_installed


def convert(
    file: Annotated[Path, typer.Argument(help="A GGUF file.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="Folder for the checkpoint; it must not exist.")],
    as_json: AsJson = False,
) -> None:
    """Write a GGUF file's model as a folder that every role can serve, with its weights out of their quantisation.

    `--target FILE.gguf` does the same by itself, into a cache; this is for machines that lack torch or the memory.
    """
    with explained("convert"):
        need_installed("torch", "transformers", "gguf")
        from slipstream.errors import InvalidArgument
        from slipstream.tokenizer.gguf_folder import convert as write_folder

        if out.exists():
            raise InvalidArgument(f"{out} exists; name a folder that does not.")
        write_folder(file, out)
    size = sum(each.stat().st_size for each in out.glob("*.safetensors"))
    if as_json:
        typer.echo(json.dumps({"out": str(out), "bytes": size}))
        return
    typer.echo(f"{out}: {size / 1e6:.0f} MB of weights")
