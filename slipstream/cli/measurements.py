"""`slipstream bench`, `compare` and `plan`: measured speed, experiments' arms, and the size of a fleet."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

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
    with_channels,
)
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.client.load_generator import run_load
from slipstream.errors import FailedPrecondition
from slipstream.experiments.comparison import (
    ComparedLine,
    Prices,
    compare,
    merge,
    number,
    reached,
    shadows,
    uneven,
    watched,
)
from slipstream.experiments.estimates import CONFIDENCE, Interval
from slipstream.rpc.channel import parsed
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

PLAN_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""`plan` passes its arguments on."""
COLUMN_WIDTH = 30


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
    confidence: Annotated[float, typer.Option(help="Confidence of each interval.", min=0.5, max=0.9999)] = CONFIDENCE,
    as_json: AsJson = False,
) -> None:
    """Compare the arms of the experiment that these gateways run (GATEWAY_EXPERIMENT), over the sessions of all."""
    if verifier_price is None and drafter_price is not None:
        raise typer.BadParameter("--drafter-price needs --verifier-price.")
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
        typer.echo(json.dumps(_experiment_report(experiment, prices, confidence)))
    else:
        for line in _experiment_text(experiment, prices, confidence):
            typer.echo(line)


def _experiment_text(
    experiment: gateway_pb2.GetExperimentResponse, prices: Prices | None, confidence: float
) -> Iterator[str]:
    yield f"experiment {experiment.name}: {experiment.arms_setting}"
    yield f"{100 * confidence:g} % intervals, over sessions"
    for arm in experiment.arms:
        yield f"  {arm.name}: {arm.begun} begun, {arm.finished} finished, {len(arm.samples)} of them measured here"
    for warning in uneven(experiment):
        yield f"WARNING: {warning}; find out why before you trust what follows."
    first = experiment.arms[0]
    compared = compare(experiment.arms, prices, confidence)
    for arm in experiment.arms[1:] or [first]:
        yield from _table(first.name, arm.name, compared[arm.name])
    for arm in experiment.arms:
        for name, lines in shadows(arm, confidence).items():
            yield from _table(f"served in {arm.name}", f"{name} (shadow)", lines)
    yield ""
    yield "share of rounds that accepted at least 1, 2, 3, ... candidates"
    for name, shares in _reached(experiment).items():
        yield f"  {name}: {' '.join(f'{share:.2f}' for share in shares) or 'none'}"


def _table(first: str, second: str, lines: Sequence[ComparedLine]) -> Iterator[str]:
    """Two columns and their difference; one column where an experiment has a single arm."""
    alone = first == second
    yield ""
    yield f"{'':22}{first:{COLUMN_WIDTH}}{'' if alone else f'{second:{COLUMN_WIDTH}}'}".rstrip()
    for line in lines:
        name = f"{line.metric.name}{f', {line.metric.unit}' if line.metric.unit else ''}"
        rest = "" if alone else f"{_interval(line.second):{COLUMN_WIDTH}}{line.conclusion(second)}"
        yield f"{name:22}{_interval(line.first):{COLUMN_WIDTH}}{rest}".rstrip()


def _interval(one: Interval) -> str:
    if math.isnan(one.value):
        return "-"
    ends = [number(end) if math.isfinite(end) else "-" for end in (one.low, one.high)]
    return f"{number(one.value)} ({' to '.join(ends)})"


def _reached(experiment: gateway_pb2.GetExperimentResponse) -> dict[str, list[float]]:
    found = {}
    for arm in experiment.arms:
        found[arm.name] = reached(arm.samples)
        for name in watched(arm):
            samples = [sample for sample in arm.samples if name in sample.shadows]
            found[f"{name} (shadow in {arm.name})"] = reached(samples, name)
    return found


def _experiment_report(
    experiment: gateway_pb2.GetExperimentResponse, prices: Prices | None, confidence: float
) -> dict[str, Any]:
    """The object that `--json` prints; unknown numbers are null."""
    compared = compare(experiment.arms, prices, confidence)
    return {
        "experiment": experiment.name,
        "arms_setting": experiment.arms_setting,
        "confidence": confidence,
        "warnings": uneven(experiment),
        "arms": {
            arm.name: {
                "begun": arm.begun,
                "finished": arm.finished,
                "measured": len(arm.samples),
                "metrics": _lines(arm.name, compared[arm.name], against_itself=arm is experiment.arms[0]),
                "shadows": {name: _lines(name, lines) for name, lines in shadows(arm, confidence).items()},
            }
            for arm in experiment.arms
        },
        "reached": _reached(experiment),
    }


def _lines(name: str, lines: Sequence[ComparedLine], *, against_itself: bool = False) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for line in lines:
        found[line.metric.name] = {"unit": line.metric.unit, **_numbers(line.second)}
        if not against_itself:
            found[line.metric.name] |= {"difference": _numbers(line.difference), "verdict": line.conclusion(name)}
    return found


def _numbers(one: Interval) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in one._asdict().items()}


def plan(context: typer.Context) -> None:
    """Replicas of each role, latencies and cost for a traffic, against co-located speculation and none."""
    # A process of its own, as the roles are: it uses the verifier's rules, and shared code imports no service.
    raise typer.Exit(subprocess.run([sys.executable, "-m", "capacity", *context.args], check=False).returncode)
