"""The shared store: Redis 6.2 and later, or Valkey. Two keys for each session, one script for each write.

The keys share a hash tag, hence a cluster slot. The server's own clock decides about leases, so no two machines' clocks
are ever compared. Scripts run by EVALSHA and are loaded again when the server forgot them (a restart, a failover).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from gateway.store.record import Record, pack, refusal, unpack
from slipstream.errors import Unavailable

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0
RETRIES = 2


def connect(url: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Redis:
    """Never waits for ever: without socket timeouts a frozen server would freeze every session."""
    return Redis.from_url(
        url,
        protocol=3,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=reply_timeout_s,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), RETRIES),  # every write may be repeated
        health_check_interval=15,
    )


class RedisStore:
    def __init__(self, client: Redis, *, owner: str, ttl_s: float, lease_s: float) -> None:
        self._client = client
        self._owner = owner
        self._tail = (int(ttl_s * 1000), int(lease_s * 1000))
        names = ("create", "append", "truncate", "takeover", "finish")
        self._scripts = {name: client.register_script(_source(name)) for name in names}

    async def create(self, record: Record) -> None:
        tokens = pack(record.tokens)
        await self._run("create", record.id, record.epoch, record.params, record.prompt_length, tokens)

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        await self._run("append", session, epoch, start, pack(tokens))

    async def truncate(self, session: str, epoch: int, length: int) -> None:
        await self._run("truncate", session, epoch, length)

    async def takeover(self, session: str) -> Record:
        await self._run("takeover", session, 0)
        return await self.read(session)

    async def finish(self, session: str, epoch: int, outcome: bytes) -> None:
        await self._run("finish", session, epoch, outcome)

    async def read(self, session: str) -> Record:
        meta_key, tokens_key = _keys(session)
        async with _typed():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hgetall(meta_key)
            pipeline.get(tokens_key)
            meta, tokens = await pipeline.execute()
        if not meta or tokens is None:
            raise refusal("MISSING", session, 0, 0)
        return Record(
            id=session,
            epoch=int(meta[b"epoch"]),
            params=meta[b"params"],
            prompt_length=int(meta[b"prompt_length"]),
            tokens=unpack(tokens),
            owner=meta[b"owner"].decode(),
            outcome=meta[b"outcome"],
        )

    async def close(self) -> None:
        async with _typed():
            await self._client.aclose()

    async def _run(self, name: str, session: str, epoch: int, *arguments: Any) -> None:
        """Every script takes owner, TTL, lease and epoch first, and answers {word, stored epoch, stored length}."""
        async with _typed():
            answer: Any = await self._scripts[name](
                keys=list(_keys(session)), args=[self._owner, *self._tail, epoch, *arguments]
            )
        word = answer[0].decode()
        if word != "OK":
            raise refusal(word, session, int(answer[1]), int(answer[2]))


def _keys(session: str) -> tuple[str, str]:
    return f"{{{session}}}:meta", f"{{{session}}}:tokens"


def _source(name: str) -> str:
    """A script behind the prelude that all of them share."""
    folder = files("gateway.store")
    return "".join((folder / part).read_text("utf-8") for part in ("prelude.lua", f"{name}.lua"))


@asynccontextmanager
async def _typed() -> AsyncIterator[None]:
    """Out of memory, a read-only replica and a lost connection are the same to a session: the store is away."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(
            "The session store does not answer; retry, and look at the store if it stays so.",
            reason="STORE_UNAVAILABLE",
        ) from error
