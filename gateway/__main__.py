"""`python -m gateway`: one gateway, configured by `GATEWAY_*`."""

from __future__ import annotations

from gateway.config import GatewayConfig
from gateway.gateway import serve
from slipstream.config import from_env
from slipstream.server import run


async def main() -> None:
    await serve(from_env(GatewayConfig, "GATEWAY_"))


if __name__ == "__main__":
    run("gateway", main())
