"""`python -m verifier_svc`: one verifier, configured by `VERIFIER_*`; `torchrun -m verifier_svc`: one rank of it."""

from __future__ import annotations

import asyncio

from slipstream.config import from_env
from slipstream.engine.group import LEADER, Place
from slipstream.interpreter import tune
from slipstream.server import explained, run, until_signal
from slipstream.telemetry.exporting import tracing_from_env
from slipstream.tls import certificates_from_env
from verifier_svc.config import VerifierConfig
from verifier_svc.target import follow
from verifier_svc.verifier import Parts, running


async def serve(place: Place) -> None:
    config, certificates = from_env(VerifierConfig, "VERIFIER_"), certificates_from_env()
    async with (
        tracing_from_env("slipstream-verifier") as tracing,
        running(config, Parts(certificates=certificates, tracing=tracing)) as verifier,
    ):
        await asyncio.wrap_future(verifier.service.grammars.prepare())
        await verifier.server.serving(True)
        print(verifier.server.announcement, flush=True)
        tune()
        await until_signal(with_parent=place.size > 1)  # without torchrun nobody watches over the ranks


def main() -> None:
    with explained("verifier"):
        place = Place.told()
    if place.rank == LEADER:
        run("verifier", serve(place))
        return
    with explained(f"verifier, rank {place.rank}"):
        follow(from_env(VerifierConfig, "VERIFIER_"), place)


if __name__ == "__main__":
    main()
