"""`python -m gateway`: one gateway, configured by `GATEWAY_*`."""

from __future__ import annotations

import asyncio
import sys

from gateway.config import GatewayConfig
from gateway.gateway import serve
from slipstream.config import from_env
from slipstream.errors import SlipstreamError

if __name__ == "__main__":
    try:
        asyncio.run(serve(from_env(GatewayConfig, "GATEWAY_")))
    except SlipstreamError as error:
        sys.exit(f"gateway: {error.message}")
