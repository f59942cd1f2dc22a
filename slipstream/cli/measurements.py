"""`slipstream bench`, `compare` and `plan`: measured speed, experiments' arms, and the size of a fleet."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc
import typer

from slipstream.cli.options import (
    ApiKey,
    AsJson,
    Ca,
    MaxDraftTokens,
    Server,
    Servers,
    Tls,
    Workload,
    endpoints,
    explained,
    need_installed,
    with_channels,
)
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.client.load_generator import run_load
from slipstream.errors import FailedPrecondition
from slipstream.rpc.channel import parsed
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

PLAN_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""`plan` passes its arguments on."""


def bench(
    prompts: Annotated[Path, typer.Argument(help="Text file with one prompt a line (\\n stands for a line break).")],
    server: Server = "127.0.0.1:50051",
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    concurrency: Annotated[int, typer.Option(help="Most requests at once.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each request.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the first request; each later one is higher by 1.", min=0)] = 0,
    repeats: Annotated[int, typer.Option(help="Number of pairs of runs.", min=1)] = 3,
    max_draft_tokens: MaxDraftTokens = None,
    workload: Workload = "",
) -> None:
    """Send the prompts alternately without and with speculation, and print one JSON line for each run."""
    try:
        texts = [line.replace("\\n", "\n") for line in prompts.read_text().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{prompts} cannot be read: {error}.") from error
    if not texts:
        raise typer.BadParameter(f"{prompts} holds no prompt.")

    def requests(plain: bool) -> list[gateway_pb2.GenerateRequest]:
        salt = secrets.token_hex(8)  # the KV cache of one run must not make the next one faster
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


def compare_arms(
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    verifier_price: Annotated[float | None, typer.Option(help="Price of one verifier for an hour.", min=0.0)] = None,
    drafter_price: Annotated[float | None, typer.Option(help="Price of one drafter for an hour.", min=0.0)] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of each interval.", min=0.5, max=0.9999)] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Compare the arms of the experiment that these gateways run (GATEWAY_EXPERIMENT), over the sessions of all."""
    if verifier_price is None and drafter_price is not None:
        raise typer.BadParameter("--drafter-price needs --verifier-price.")
    with explained("compare"):
        from slipstream.cli.experiment_report import experiment_report, experiment_text
        from slipstream.experiments.comparison import Prices, merge
    prices = None if verifier_price is None else Prices(verifier_price, drafter_price or 0.0)

    async def get_experiment(channels: Sequence[grpc.aio.Channel]) -> gateway_pb2.GetExperimentResponse:
        stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in channels]
        parts = await asyncio.gather(*(stub.GetExperiment(gateway_pb2.GetExperimentRequest()) for stub in stubs))
        return merge([parsed(part) for part in parts])

    servers = list(dict.fromkeys(server or []))
    experiment = asyncio.run(with_channels("compare", endpoints(servers, api_key, tls, ca), get_experiment))
    with explained("compare"):
        if not any(arm.samples for arm in experiment.arms):
            raise FailedPrecondition("no session of the experiment has finished yet.", reason="NO_SESSIONS")
    if as_json:
        typer.echo(json.dumps(experiment_report(experiment, prices, confidence)))
    else:
        for line in experiment_text(experiment, prices, confidence):
            typer.echo(line)


def plan(context: typer.Context) -> None:
    """Replicas of each role, latencies and cost for a traffic, against co-located speculation and none."""
    with explained("plan"):
        need_installed("numpy")
    # A process of its own, as the roles are: it uses the verifier's rules, and shared code imports no service.
    raise typer.Exit(subprocess.run([sys.executable, "-m", "capacity", *context.args], check=False).returncode)
