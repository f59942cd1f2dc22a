"""Both kinds of store as one world for several owners, whose time passes when a test advances it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.redis import Client, RedisStore, close_client, connect
from gateway.store.session_store import SessionRecord, SessionStore
from slipstream.errors import SlipstreamError, Unavailable

PROMPT = (5, 0, 4_294_967_295)

# A server's clock cannot be set: its records are made older instead, by ARGV[1] milliseconds.
AGE = """
local lease = tonumber(redis.call('HGET', KEYS[1], 'lease') or 0)
if lease > 0 then
  redis.call('HSET', KEYS[1], 'lease', string.format('%d', math.max(1, lease - ARGV[1])))
end
for _, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  if left > 0 then
    redis.call('PEXPIRE', key, math.max(0, left - ARGV[1]))
  end
end
"""


def record(**changes: Any) -> SessionRecord:
    fresh = SessionRecord(
        id=uuid.uuid4().hex, epoch=1, params=b"\x00params\xff", prompt_length=len(PROMPT), tokens=PROMPT
    )
    return replace(fresh, **changes)


@dataclass
class World:
    """One kind of store, seen by several owners."""

    open: Callable[..., SessionStore]
    pass_time: Callable[[list[str], float], Awaitable[None]]
    known: list[str] = field(default_factory=list)

    def store(self, owner: str = "a", *, ttl_s: float = 60.0, lease_s: float = 60.0) -> SessionStore:
        return self.open(owner=owner, ttl_s=ttl_s, lease_s=lease_s)

    def record(self, **changes: Any) -> SessionRecord:
        made = record(**changes)
        self.known.append(made.id)
        return made

    async def advance(self, seconds: float) -> None:
        """Time passes for every record that was made here."""
        await self.pass_time(self.known, seconds)


def memory_world() -> World:
    now = [1000.0]
    memory = MemoryBackend(clock=lambda: now[0])

    async def pass_time(_: list[str], seconds: float) -> None:
        now[0] += seconds

    return World(lambda **options: MemoryStore(memory, **options), pass_time)


def redis_world(client: Client) -> World:
    async def pass_time(sessions: list[str], seconds: float) -> None:
        for session in sessions:
            await client.eval(AGE, 2, *keys(session), int(seconds * 1000))

    return World(lambda **options: RedisStore(client, **options), pass_time)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Client]:
    client = connect(url, **options)
    try:
        yield client
    finally:
        await close_client(client)


def keys(session: str) -> tuple[str, str]:
    """What a session is called in Redis."""
    return f"{{{session}}}:meta", f"{{{session}}}:tokens"


async def when_back(operation: Callable[[], Awaitable[Any]]) -> Any:
    """Its result, tried again while the store is away: a busy machine answers late."""
    async with asyncio.timeout(60):
        while True:
            with suppress(Unavailable):
                return await operation()
            await asyncio.sleep(0.02)


async def outcome(operation: Awaitable[Any]) -> str:
    """OK, or the name of the typed error."""
    try:
        await operation
    except SlipstreamError as error:
        return type(error).__name__
    return "OK"
