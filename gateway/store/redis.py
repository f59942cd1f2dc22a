"""The shared store: Redis 6.2 and later, or Valkey; one server, with sentinels, or a cluster.

Two keys for each session, one script for each operation. The keys share a hash tag, hence a cluster slot. The server's
own clock decides about leases, so no two machines' clocks are ever compared. Scripts run by EVALSHA and are loaded
again when the server forgot them (a restart, a failover).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisClusterException, RedisError

from gateway.store.client import Client, close
from gateway.store.record import SessionRecord, pack, refusal, unpack
from slipstream.errors import Unavailable

Done = TypeVar("Done")

REPLICATION_TIMEOUT_S = 1.0
"""How long a write waits for replicas; below the timeout of a reply."""


class RedisStore:
    def __init__(self, client: Client, *, owner: str, ttl_s: float, lease_s: float, replicas: int = 0) -> None:
        """A write is done once `replicas` replicas have it too (of a primary that is no cluster's)."""
        self._client = client
        self.owner = owner
        self._tail = (int(ttl_s * 1000), int(lease_s * 1000))
        self._replicas = replicas
        names = ("create", "append", "truncate", "restore", "takeover", "renew", "finish", "read")
        self._scripts = {name: client.register_script(_source(name)) for name in names}

    async def create(self, record: SessionRecord) -> None:
        await self._run("create", record.id, record.epoch, *_whole(record))

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        await self._run("append", session, epoch, start, pack(tokens))

    async def truncate(
        self, session: str, epoch: int, length: int, params: bytes | None = None, tokens: Sequence[int] = ()
    ) -> None:
        await self._run("truncate", session, epoch, length, pack(tokens), *_given(params))

    async def restore(self, record: SessionRecord) -> None:
        await self._run("restore", record.id, record.epoch, *_whole(record))

    async def takeover(self, session: str, *, force: bool = False) -> SessionRecord:
        return _record(session, await self._run("takeover", session, 0, int(force)))

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._run("renew", session, epoch, _number(length))

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        await self._run("finish", session, epoch, _number(length), outcome)

    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._run("finish", session, epoch, _number(length))

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        return _record(session, await self._run("read", session, 0, start))

    async def close(self) -> None:
        async with _typed():
            await close(self._client)

    async def _run(self, name: str, session: str, epoch: int, *arguments: Any) -> list[Any]:
        """Every script takes owner, TTL, lease and epoch first, and answers [word, stored epoch, stored length]; where
        it answers with a record, its fields follow."""
        replicas = 0 if name == "read" else self._replicas
        words = [*_keys(session), self.owner, *self._tail, epoch, *arguments]
        async with _typed():
            answer, reached = await _cancellable(self._evaluate(self._scripts[name], words, replicas))
        word = answer[0].decode()
        if word != "OK":
            raise refusal(word, session, int(answer[1]), int(answer[2]))
        if reached < replicas:
            raise Unavailable(
                f"The session store has {reached} of {replicas} replicas up to date; retry.", reason="NOT_REPLICATED"
            )
        return answer

    async def _evaluate(self, script: AsyncScript, words: list[Any], replicas: int) -> tuple[list[Any], int]:
        """The script's answer, and how many replicas have what it wrote."""
        if not replicas:
            return await script(keys=words[:2], args=words[2:]), 0
        try:
            return await self._evaluate_and_wait(script.sha, words, replicas)
        except NoScriptError:
            await self._client.script_load(script.script)
            return await self._evaluate_and_wait(script.sha, words, replicas)

    async def _evaluate_and_wait(self, sha: str, words: list[Any], replicas: int) -> tuple[list[Any], int]:
        """In one round trip, on one connection: WAIT speaks of that connection's writes."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.evalsha(sha, 2, *words)
        pipeline.wait(replicas, int(REPLICATION_TIMEOUT_S * 1000))
        answer, reached = await pipeline.execute()
        return answer, int(reached)


def _keys(session: str) -> tuple[str, str]:
    return f"{{{session}}}:meta", f"{{{session}}}:tokens"


def _whole(record: SessionRecord) -> tuple[bytes, int, bytes]:
    return record.params, record.prompt_length, pack(record.tokens)


def _number(length: int | None) -> int | str:
    return "" if length is None else length


def _given(params: bytes | None) -> tuple[bytes, ...]:
    return () if params is None else (params,)


def _record(session: str, answer: list[Any]) -> SessionRecord:
    """From what `record` in prelude.lua answers."""
    _, epoch, _, params, prompt_length, owner, outcome, lease_ms, start, tokens = answer
    return SessionRecord(
        id=session,
        epoch=int(epoch),
        params=params,
        prompt_length=int(prompt_length),
        tokens=unpack(tokens),
        owner=owner.decode(),
        outcome=outcome,
        start=int(start),
        lease_s=int(lease_ms) / 1000,
    )


def _source(name: str) -> str:
    """A script behind the prelude that all of them share."""
    folder = files("gateway.store")
    return "".join((folder / part).read_text("utf-8") for part in ("prelude.lua", f"{name}.lua"))


async def _cancellable(doing: Awaitable[Done]) -> Done:
    """redis-py writes inside of `asyncio.wait_for`, which up to Python 3.11 forgets a cancellation that comes as it
    ends: a session whose client left just then would be kept for ever."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await doing
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


@asynccontextmanager
async def _typed() -> AsyncIterator[None]:
    """Out of memory, a read-only replica and a lost connection are the same to a session: the store is away."""
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise Unavailable(
            "The session store does not answer; retry, and look at the store if it stays so.",
            reason="STORE_UNAVAILABLE",
        ) from error
