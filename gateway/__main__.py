"""`python -m gateway`: one gateway, configured by `GATEWAY_*`."""

from __future__ import annotations

from gateway.config import GatewayConfig
from gateway.gateway import serve
from slipstream.config import from_env
from slipstream.server import run
from slipstream.telemetry import logs


async def main() -> None:
    config = from_env(GatewayConfig, "GATEWAY_")
    logs.configure("gateway", config.log_level, config.log_format)
    await serve(config)


if __name__ == "__main__":
    run("gateway", main())
