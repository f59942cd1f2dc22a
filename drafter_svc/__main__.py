"""`python -m drafter_svc`: one drafter, configured by `DRAFTER_*`."""

from __future__ import annotations

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running
from slipstream.config import from_env
from slipstream.interpreter import tune
from slipstream.server import run, until_signal


async def main() -> None:
    async with running(from_env(DrafterConfig, "DRAFTER_")) as drafter:
        await drafter.server.serving(True)
        print(f"ready grpc={drafter.address}", flush=True)
        tune()
        await until_signal()


if __name__ == "__main__":
    run("drafter", main())
