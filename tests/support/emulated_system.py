"""A whole system in the test's own loop: gateway with HTTP, verifier and drafter, real but for their models."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, GatewayServer, running
from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from tests.support.fleet import drafter, until, verifier

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
TARGET = "emulated:base_ms=15&vocabulary=4096"
DRAFT = "emulated:base_ms=1&acceptance=0.8&vocabulary=4096"
KV = 1_000_000


class EmulatedSystem:
    """Workers that stay, and a gateway that can be ended and started again at its addresses."""

    def __init__(self, verifier: str, drafter: str, **settings: Any) -> None:
        """`settings`: of the gateway."""
        self._workers = {"verifiers": (verifier,), "drafters": (f"model={drafter}",)}
        self._settings = settings
        self._backend = MemoryBackend()
        self._stack = AsyncExitStack()
        self._started = 0
        self.http = "127.0.0.1:0"
        self.gateway: GatewayServer

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    async def start_gateway(self) -> None:
        """The sessions of the gateway before are in the store."""
        self._started += 1
        store = MemoryStore(self._backend, owner=f"g{self._started}", ttl_s=600, lease_s=1)
        config = GatewayConfig(
            tokenizer=TOKENIZER, listen="127.0.0.1:0", http=self.http, grace_s=0.0, **self._workers, **self._settings
        )
        world = GatewayDependencies(random.Random(self._started).getrandbits, store=store)
        self.gateway = await self._stack.enter_async_context(running(config, world))
        await self.gateway.ready()
        await until(lambda: all(known.present for known in self.gateway.router.drafters))
        self.http = self.gateway.server.http_address

    async def stop_gateway(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def emulated_system(
    target: Engine | None = None, draft: Engine | None = None, **settings: Any
) -> AsyncIterator[EmulatedSystem]:
    async with (
        verifier(target or open_engine(TARGET, kv_tokens=KV), silence_s=0.4) as verifying,
        drafter(draft or open_engine(DRAFT, kv_tokens=KV)) as drafting,
    ):
        system = EmulatedSystem(verifying.address, drafting, **settings)
        await system.start_gateway()
        try:
            yield system
        finally:
            await system.stop_gateway()
