"""`slipstream compare`: the arms of an experiment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated

import grpc
import typer

from slipstream.cli.options import AsJson, Connection, explained
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.errors import FailedPrecondition
from slipstream.rpc.channel import error_of, parsed
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc


def compare_arms(
    connection: Connection,
    verifier_price: Annotated[float | None, typer.Option(help="Price of one verifier for an hour.", min=0.0)] = None,
    drafter_price: Annotated[float | None, typer.Option(help="Price of one drafter for an hour.", min=0.0)] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of each interval.", min=0.5, max=0.9999)] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Compare the arms of the experiment that these gateways run (GATEWAY_EXPERIMENT), over the sessions of all."""
    if verifier_price is None and drafter_price is not None:
        raise typer.BadParameter("--drafter-price needs --verifier-price.")
    with explained("compare"):
        from measurement.cli.experiment_report import experiment_report, experiment_text
        from measurement.experiments.comparison import Prices
    prices = None if verifier_price is None else Prices(verifier_price, drafter_price or 0.0)
    with explained("compare"):
        experiment = asyncio.run(_experiment(list(dict.fromkeys(connection.endpoints()))))
        if not any(arm.samples for arm in experiment.arms):
            raise FailedPrecondition("no session of the experiment has finished yet.", reason="NO_SESSIONS")
    if as_json:
        typer.echo(json.dumps(experiment_report(experiment, prices, confidence)))
    else:
        for line in experiment_text(experiment, prices, confidence):
            typer.echo(line)


async def _experiment(gateways: Sequence[GatewayEndpoint]) -> gateway_pb2.GetExperimentResponse:
    """The experiment of all these gateways. Raises the SlipstreamError of one that cannot be asked."""
    from measurement.experiments.comparison import merge

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(gateway.channel()) for gateway in gateways]
        stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in channels]
        try:
            parts = await asyncio.gather(*(stub.GetExperiment(gateway_pb2.GetExperimentRequest()) for stub in stubs))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
    return merge([parsed(part) for part in parts])
