"""`python -m tests.isolation.attacker`: key A's client as a process of its own, so that what it computes is not taken
for what its neighbour waits for. Serves the model `scribe` too, which only A asks for.

Prints the address of that model's verifier, then reads a line of JSON with the gateway's addresses, and then lines with
attacks, or `null` to stop the one that runs, each of which it answers with a line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.v1 import gateway_pb2_grpc
from tests.isolation.attacks import ATTACKS, Attacker, under_way
from tests.isolation.scribe import scribe
from tests.support.scripted_verifier import served

NICENESS = 10
"""A client computes elsewhere: here it gives way to what is measured."""


def client(url: str, key: str) -> httpx.AsyncClient:
    """Without a bound on its connections."""
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False)


@asynccontextmanager
async def attacker(http: str, grpc: str, key: str, model: str) -> AsyncIterator[Attacker]:
    async with AsyncExitStack() as stack:
        web = await stack.enter_async_context(client(f"http://{http}", key))
        rpc = await stack.enter_async_context(GatewayEndpoint(grpc, key).channel())
        host, _, port = http.rpartition(":")
        yield Attacker(web, rpc, gateway_pb2_grpc.GatewayServiceStub(rpc), (host, int(port)), model)


async def main() -> None:
    os.nice(NICENESS)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def line() -> Any:
        return json.loads(await reader.readline() or "null")

    async with served(scribe()) as (address, _):
        print(address, flush=True)
        async with attacker(**await line()) as attacks:
            while (asked := await line()) is not None:
                name, target = asked
                attacks.sessions.clear()
                async with under_way(ATTACKS[name], attacks, target) as outcomes:
                    print("begun", flush=True)
                    await line()
                print(json.dumps(Counter(outcomes)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
