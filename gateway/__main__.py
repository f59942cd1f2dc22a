"""`python -m gateway`: one gateway, configured by `GATEWAY_*`. With `--check` it only reports what would
keep it from starting; `--help` prints what each variable means."""

from __future__ import annotations

import sys

from gateway.auth.loop_turns import FairLoop
from gateway.config import PREFIX, GatewayConfig
from gateway.gateway import check, serve
from slipstream.config import from_env
from slipstream.config_help import helped
from slipstream.process import run_role
from slipstream.telemetry import logs


async def main(checking: bool) -> None:
    config = from_env(GatewayConfig, PREFIX)
    logs.configure("gateway", config.log_level, config.log_format)
    await (check(config) if checking else serve(config))


if __name__ == "__main__":
    if not helped("python -m gateway [--check]: one gateway. It reads:", PREFIX, GatewayConfig):
        run_role("gateway", main(sys.argv[1:] == ["--check"]), FairLoop)
