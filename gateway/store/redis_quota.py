"""What API keys use, counted in Redis for all gateways: one hash and one script for each key, by the server's clock.

Each call is one round trip. While Redis fails, calls raise Unavailable at once, but for one try a second, so that no
request waits for it longer than TIMEOUT_S; gateways count for themselves meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.store.quota import Demand
from gateway.store.redis import Client, cancellable, source, typed_errors
from slipstream.errors import Unavailable

TIMEOUT_S = 1.0
RETRY_S = 1.0
PERIOD_MS = 60_000


class RedisQuota:
    def __init__(
        self, client: Client, *, gateway: str, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`lease_s`: seconds after which the sessions of a gateway that reports nothing are not counted any more."""
        self._gateway = gateway
        self._stale_ms = int(lease_s * 1000)
        self._clock = clock
        self._script = client.register_script(source("quota.lua"))
        self._next_try = 0.0

    async def charge(self, key: str, demand: Demand) -> tuple[str, float]:
        return await self._run(key, demand, "")

    async def report_sessions(self, key: str, sessions: int) -> None:
        await self._run(key, Demand(), str(sessions))

    async def _run(self, key: str, demand: Demand, reported: str) -> tuple[str, float]:
        if self._clock() < self._next_try:
            raise Unavailable("The shared count of API keys is away.", reason="STORE_UNAVAILABLE")
        rates = demand.requests, demand.requests_per_minute, demand.tokens, demand.tokens_per_minute
        sessions = demand.sessions, demand.most_sessions
        words: list[str | int] = [self._gateway, self._stale_ms, PERIOD_MS, *rates, *sessions, reported]
        try:
            async with typed_errors(), asyncio.timeout(TIMEOUT_S):
                refused, wait_ms = await cancellable(self._script(keys=[f"quota:{{{key}}}"], args=words))
        except Unavailable:
            self._next_try = self._clock() + RETRY_S
            raise
        return refused.decode(), int(wait_ms) / 1000
