"""`python -m drafter_svc`: one drafter, configured by `DRAFTER_*`; `--help` prints what each variable means."""

from __future__ import annotations

from drafter_svc.config import PREFIX, DrafterConfig
from slipstream.config import from_env
from slipstream.config_help import helped
from slipstream.process import run_role, tune_runtime, until_signal
from slipstream.rpc.tls import certificates_from_env
from slipstream.telemetry import logs
from slipstream.telemetry.span_exporters import tracing_from_env
from slipstream.tokenizer.vocabulary import check_folder


async def main() -> None:
    config = from_env(DrafterConfig, PREFIX)
    logs.configure("drafter", config.log_level, config.log_format)
    for model in filter(None, [config.model, config.translate_for]):
        check_folder(model)
    # Imported now, because torch takes seconds and missing settings are reported at once.
    from drafter_svc.drafter import running

    async with (
        tracing_from_env("slipstream-drafter") as tracing,
        running(config, certificates=certificates_from_env(), tracing=tracing) as drafter,
    ):
        await drafter.server.set_serving(True)
        tune_runtime()
        await until_signal(drafter.server.announcement)


if __name__ == "__main__":
    if not helped("python -m drafter_svc: one drafter. It reads:", PREFIX, DrafterConfig):
        run_role("drafter", main())
