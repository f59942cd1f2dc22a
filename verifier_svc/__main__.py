"""`python -m verifier_svc`: one verifier, configured by `VERIFIER_*`."""

from __future__ import annotations

import asyncio

from slipstream.config import from_env
from slipstream.interpreter import tune
from slipstream.server import run, until_signal
from verifier_svc.config import VerifierConfig
from verifier_svc.verifier import running


async def main() -> None:
    async with running(from_env(VerifierConfig, "VERIFIER_")) as verifier:
        await asyncio.wrap_future(verifier.service.grammars.prepare())
        await verifier.server.serving(True)
        print(f"ready grpc={verifier.address}", flush=True)
        tune()
        await until_signal()


if __name__ == "__main__":
    run("verifier", main())
