"""`python -m verifier_svc`: one verifier, configured by `VERIFIER_*`."""

from __future__ import annotations

from slipstream.config import from_env
from slipstream.interpreter import tune
from slipstream.server import run, until_signal
from slipstream.tls import certificates_from_env
from verifier_svc.config import VerifierConfig
from verifier_svc.verifier import Parts, running


async def main() -> None:
    config, parts = from_env(VerifierConfig, "VERIFIER_"), Parts(certificates=certificates_from_env())
    async with running(config, parts) as verifier:
        await verifier.server.serving(True)
        print(verifier.server.announcement, flush=True)
        tune()
        await until_signal()


if __name__ == "__main__":
    run("verifier", main())
