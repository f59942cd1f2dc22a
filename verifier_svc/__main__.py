"""`python -m verifier_svc`: one verifier, configured by `VERIFIER_*`; `--help` prints what each variable means."""

from __future__ import annotations

import asyncio
import logging

from slipstream.config import from_env
from slipstream.config_help import helped
from slipstream.process import exit_on_error, run_role, tune_runtime, until_signal
from slipstream.rpc.tls import certificates_from_env
from slipstream.telemetry import logs
from slipstream.telemetry.span_exporters import tracing_from_env
from slipstream.tokenizer.vocabulary import check_folder
from verifier_svc.config import PREFIX, VerifierConfig

log = logging.getLogger("verifier_svc")  # run as a program, the module is called __main__


async def serve(config: VerifierConfig) -> None:
    # Imported now, because torch takes seconds and a missing model is reported at once.
    from verifier_svc.verifier import VerifierParts, running

    async with (
        tracing_from_env("slipstream-verifier") as tracing,
        running(config, VerifierParts(certificates=certificates_from_env(), tracing=tracing)) as verifier,
    ):
        await asyncio.wrap_future(verifier.service.grammars.prepare())
        await verifier.server.set_serving(True)
        model = verifier.executor.model
        log.info(
            "%s: arithmetic %s, %s promised",
            *(model.name, model.arithmetic, "the same tokens" if model.batch_invariant else "the same distribution"),
        )
        tune_runtime()
        await until_signal(verifier.server.announcement)


def main() -> None:
    with exit_on_error("verifier"):
        config = from_env(VerifierConfig, PREFIX)
        logs.configure("verifier", config.log_level, config.log_format)
        for model in filter(None, [config.model, *config.local_methods().values()]):
            check_folder(model)
    run_role("verifier", serve(config))


if __name__ == "__main__" and not helped("python -m verifier_svc: one verifier. It reads:", PREFIX, VerifierConfig):
    main()
