"""`slipstream bench`: load on a running gateway, speculation on and off in turn."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import ApiKey, Ca, Server, Tls, explained
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.client.load_generator import run_load
from slipstream.v1 import gateway_pb2


def bench(
    prompts: Annotated[Path, typer.Argument(help="Text file with one prompt a line (\\n stands for a line break).")],
    server: Server = "127.0.0.1:50051",
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each request.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first request; the others count up.", min=0)] = 0,
    repeats: Annotated[int, typer.Option(help="Pairs of runs.", min=1)] = 3,
    max_draft_tokens: Annotated[int | None, typer.Option(help="Most candidates in one round.", min=0)] = None,
    workload: Annotated[str, typer.Option(help="Kind of work: acceptance and rules are kept apart by it.")] = "",
) -> None:
    """Run the prompts with and without speculation, in turn, and print one JSON line for each run."""
    try:
        texts = [line.replace("\\n", "\n") for line in prompts.read_text().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{prompts} cannot be read: {error}.") from error
    if not texts:
        raise typer.BadParameter(f"{prompts} holds no prompt.")

    def requests(plain: bool) -> list[gateway_pb2.GenerateRequest]:
        salt = secrets.token_hex(8)  # what a run computed of the prompts must not make the next one faster
        return [
            gateway_pb2.GenerateRequest(
                prompt=text,
                max_tokens=max_tokens,
                ignore_eos=True,
                workload=workload,
                cache_salt=salt,
                sampling=gateway_pb2.SamplingOptions(temperature=temperature, seed=seed + index),
                speculation=gateway_pb2.SpeculationOptions(disabled=plain, max_draft_tokens=max_draft_tokens),
            )
            for index, text in enumerate(texts)
        ]

    with explained("bench"):
        for _ in range(repeats):
            for plain in (True, False):
                load = asyncio.run(run_load(GatewayEndpoint(server, api_key, tls, ca), requests(plain), concurrency))
                figures = {name: value and float(f"{value:.5g}") for name, value in load.report().items()}
                typer.echo(json.dumps({"speculation": not plain, "concurrency": concurrency} | figures))
