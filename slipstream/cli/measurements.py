"""`slipstream compare`: what the arms of a running experiment brought, and whether a difference is shown."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import grpc
import typer

from slipstream.cli.options import ApiKey, Ca, Servers, Tls, explained
from slipstream.cli.session import doors_of, talk
from slipstream.errors import FailedPrecondition
from slipstream.experiments.comparison import ComparedLine, Prices, compare, number, reached, shadows, uneven, watched
from slipstream.experiments.estimates import CONFIDENCE, Interval
from slipstream.experiments.samples import merge
from slipstream.rpc.channel import parsed
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

WIDTH = 30
"""Of a column."""


def compare_arms(
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
    verifier_price: Annotated[float | None, typer.Option(help="Of one verifier's GPU, an hour.", min=0.0)] = None,
    drafter_price: Annotated[float | None, typer.Option(help="Of one drafter's GPU, an hour.", min=0.0)] = None,
    confidence: Annotated[float, typer.Option(help="Of every interval by itself.", min=0.5, max=0.9999)] = CONFIDENCE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the arms of the experiment that these gateways run (GATEWAY_EXPERIMENT), all their sessions together."""
    if verifier_price is None and drafter_price is not None:
        raise typer.BadParameter("--drafter-price alone makes no cost; give --verifier-price too.")
    prices = None if verifier_price is None else Prices(verifier_price, drafter_price or 0.0)

    async def ask(lines: Sequence[grpc.aio.Channel]) -> gateway_pb2.GetExperimentResponse:
        stubs = [gateway_pb2_grpc.GatewayServiceStub(line) for line in lines]
        told = await asyncio.gather(*(stub.GetExperiment(gateway_pb2.GetExperimentRequest()) for stub in stubs))
        return merge([parsed(each) for each in told])

    servers = list(dict.fromkeys(server or []))
    experiment = asyncio.run(talk("compare", doors_of(servers, api_key, tls, ca), ask))
    with explained("compare"):
        if not any(arm.samples for arm in experiment.arms):
            raise FailedPrecondition("no session of the experiment has finished yet.", reason="NO_SESSIONS")
    if as_json:
        typer.echo(json.dumps(_report(experiment, prices, confidence)))
    else:
        for line in _text(experiment, prices, confidence):
            typer.echo(line)


def _text(experiment: gateway_pb2.GetExperimentResponse, prices: Prices | None, confidence: float) -> Iterator[str]:
    yield f"experiment {experiment.name}: {experiment.arms_setting}"
    yield f"{100 * confidence:g} % intervals, over sessions"
    for arm in experiment.arms:
        yield f"  {arm.name}: {arm.begun} begun, {arm.finished} finished, {len(arm.samples)} of them measured here"
    for warning in uneven(experiment):
        yield f"WARNING: {warning}; find out why before you believe what follows."
    first = experiment.arms[0]
    compared = compare(experiment.arms, prices, confidence)
    for arm in experiment.arms[1:] or [first]:
        yield from _table(first.name, arm.name, compared[arm.name])
    for arm in experiment.arms:
        for name, lines in shadows(arm, confidence).items():
            yield from _table(f"served in {arm.name}", f"{name} (shadow)", lines)
    yield ""
    yield "share of rounds in which so many candidates or more were accepted, from 1 on"
    for name, shares in _reached(experiment).items():
        yield f"  {name}: {' '.join(f'{share:.2f}' for share in shares) or 'none'}"


def _table(first: str, second: str, lines: Sequence[ComparedLine]) -> Iterator[str]:
    """One arm alone has nothing to be compared with."""
    alone = first == second
    yield ""
    yield f"{'':22}{first:{WIDTH}}{'' if alone else f'{second:{WIDTH}}'}".rstrip()
    for line in lines:
        name = f"{line.metric.name}{f', {line.metric.unit}' if line.metric.unit else ''}"
        rest = "" if alone else f"{_interval(line.second):{WIDTH}}{line.verdict(second)}"
        yield f"{name:22}{_interval(line.first):{WIDTH}}{rest}".rstrip()


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


def _report(experiment: gateway_pb2.GetExperimentResponse, prices: Prices | None, confidence: float) -> dict[str, Any]:
    """Numbers that are not known are null."""
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
            found[line.metric.name] |= {"difference": _numbers(line.difference), "verdict": line.verdict(name)}
    return found


def _numbers(one: Interval) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in one._asdict().items()}
