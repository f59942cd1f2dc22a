"""The shared store: Redis 6.2 and later, or Valkey; one server, with sentinels, or a cluster.

Two keys for each session, one script for each operation. The keys share a hash tag, hence a cluster slot. The server's
own clock decides about leases. Only after a failover is a lease of one server's clock read by another's, which may be
ahead or behind: a living owner's session may then be taken from it, which its epoch makes safe and costs a prefill. A
lease that begins in the future is none, so no gateway waits longer than a lease for a dead owner, whatever its clock.
Scripts run by EVALSHA and are loaded again when the server forgot them (a restart, a failover).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar
from uuid import uuid4

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from gateway.store.address import Address, parse, refusal
from gateway.store.quota import Demand
from gateway.store.session_store import (
    KEPT_TAKEOVERS,
    SessionRecord,
    StoreMemory,
    pack_tokens,
    store_error,
    unpack_tokens,
)
from slipstream.errors import Unavailable

Done = TypeVar("Done")

REPLICATION_TIMEOUT_S = 1.0
"""Seconds that a write waits for replicas; below the timeout of a reply."""
CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0
RETRIES = 2
MAX_CONNECTIONS = 4096
"""Connections to one server: all sessions may write at once, and none may fail for want of a connection."""

Client = Redis | RedisCluster


class RedisStore:
    def __init__(self, client: Client, *, owner: str, ttl_s: float, lease_s: float, replicas: int = 0) -> None:
        """A write is done once `replicas` replicas have it too (not for a cluster)."""
        self._client = client
        self.owner = owner
        self._tail = (int(ttl_s * 1000), int(lease_s * 1000))
        self._replicas = replicas
        names = ("create", "append", "truncate", "restore", "takeover", "renew", "finish", "read", "delete")
        self._scripts = {name: client.register_script(_script(name)) for name in names}

    async def create(self, record: SessionRecord) -> None:
        await self._run("create", record.id, record.epoch, *_whole(record))

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        await self._run("append", session, epoch, start, pack_tokens(tokens))

    async def truncate(
        self, session: str, epoch: int, length: int, params: bytes | None = None, tokens: Sequence[int] = ()
    ) -> None:
        await self._run("truncate", session, epoch, length, pack_tokens(tokens), *_given(params))

    async def restore(self, record: SessionRecord) -> None:
        await self._run("restore", record.id, record.epoch, *_whole(record))

    async def takeover(self, session: str, *, force: bool = False, nonce: str = "") -> SessionRecord:
        # The client repeats a script whose reply is late, and the first one may still run after that.
        words = int(force), nonce or uuid4().hex, KEPT_TAKEOVERS
        return _record(session, await self._run("takeover", session, 0, *words))

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._run("renew", session, epoch, _number(length))

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        await self._run("finish", session, epoch, _number(length), outcome)

    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._run("finish", session, epoch, _number(length))

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        return _record(session, await self._run("read", session, 0, start))

    async def delete(self, session: str) -> None:
        await self._run("delete", session, 0)

    async def memory_usage(self) -> StoreMemory:
        async with typed_errors():
            try:
                answers = await cancellable(self._infos())
            except ResponseError:  # a user whose rules forbid INFO
                return StoreMemory(0, 0, "")
        return max(map(_memory, answers), key=lambda each: (each.evicts, each.used_share))

    async def _infos(self) -> list[dict[str, Any]]:
        """The section `memory` of INFO, of every primary."""
        if not isinstance(self._client, RedisCluster):
            return [await self._client.info("memory")]
        nodes = self._client.get_primaries()
        return await asyncio.gather(*(self._client.info("memory", target_nodes=node) for node in nodes))

    async def close(self) -> None:
        async with typed_errors():
            await close_client(self._client)

    async def _run(self, name: str, session: str, epoch: int, *arguments: Any) -> list[Any]:
        """Every script takes owner, TTL, lease and epoch first, and returns [word, stored epoch, stored length],
        followed by the record's fields where it returns a record."""
        replicas = 0 if name == "read" else self._replicas
        words = [*_keys(session), self.owner, *self._tail, epoch, *arguments]
        async with typed_errors():
            answer, reached = await cancellable(self._evaluate(self._scripts[name], words, replicas))
        word = answer[0].decode()
        if word != "OK":
            raise store_error(word, session, int(answer[1]), int(answer[2]))
        if reached < replicas:
            raise Unavailable(
                f"The session store has {reached} of {replicas} replicas up to date; retry.", reason="NOT_REPLICATED"
            )
        return answer

    async def _evaluate(self, script: AsyncScript, words: list[Any], replicas: int) -> tuple[list[Any], int]:
        """The script's reply, and the number of replicas that have its write."""
        if not replicas:
            return await script(keys=words[:2], args=words[2:]), 0
        try:
            return await self._evaluate_and_wait(script.sha, words, replicas)
        except NoScriptError:
            await self._client.script_load(script.script)
            return await self._evaluate_and_wait(script.sha, words, replicas)

    async def _evaluate_and_wait(self, sha: str, words: list[Any], replicas: int) -> tuple[list[Any], int]:
        """In one round trip, on one connection: WAIT covers that connection's writes."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.evalsha(sha, 2, *words)
        pipeline.wait(replicas, int(REPLICATION_TIMEOUT_S * 1000))
        answer, reached = await pipeline.execute()
        return answer, int(reached)


def _keys(session: str) -> tuple[str, str]:
    return f"{{{session}}}:meta", f"{{{session}}}:tokens"


def _whole(record: SessionRecord) -> tuple[bytes, int, bytes]:
    return record.params, record.prompt_length, pack_tokens(record.tokens)


def _number(length: int | None) -> int | str:
    return "" if length is None else length


def _given(params: bytes | None) -> tuple[bytes, ...]:
    return () if params is None else (params,)


def _record(session: str, answer: list[Any]) -> SessionRecord:
    """The record in the reply of `record` in prelude.lua."""
    _, epoch, _, params, prompt_length, owner, outcome, lease_ms, start, tokens = answer
    return SessionRecord(
        id=session,
        epoch=int(epoch),
        params=params,
        prompt_length=int(prompt_length),
        tokens=unpack_tokens(tokens),
        owner=owner.decode(),
        outcome=outcome,
        start=int(start),
        lease_s=int(lease_ms) / 1000,
    )


def _memory(answer: dict[str, Any]) -> StoreMemory:
    """The section `memory` of INFO."""
    return StoreMemory(int(answer["used_memory"]), int(answer["maxmemory"]), str(answer["maxmemory_policy"]))


def _script(name: str) -> str:
    """The source of a script on session records: the shared prelude, then its own."""
    return source("prelude.lua") + source(f"{name}.lua")


def source(file: str) -> str:
    """The text of a Lua file of this package."""
    return (files("gateway.store") / file).read_text("utf-8")


async def cancellable(doing: Awaitable[Done]) -> Done:
    """redis-py writes inside of `asyncio.wait_for`, which up to Python 3.11 forgets a cancellation that comes as it
    ends: a session whose client left just then would be kept for ever, and a gateway that ends just then not end."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await doing
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


@asynccontextmanager
async def typed_errors() -> AsyncIterator[None]:
    """Raises Unavailable for every failure of the client: to a session, out of memory, a read-only replica and a lost
    connection are the same."""
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise Unavailable(
            "The session store does not answer; retry, and look at the store if it stays so.",
            reason="STORE_UNAVAILABLE",
        ) from error


# Connections.


def connect(url: str, reply_timeout_s: float = REPLY_TIMEOUT_S, sentinel_password: str = "") -> Client:
    """A client with socket timeouts: without them a frozen server would freeze every session.

    Raises InvalidArgument for an address that cannot be read (see `gateway.store.address`).
    """
    address = parse(url)
    try:
        client = _client(address, reply_timeout_s, sentinel_password)
        if isinstance(client, Redis):
            # Opens nothing; checks the options now, not at the first request.
            client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, RedisError) as error:  # of the options behind the address
        raise refusal(str(error)) from error
    return client


async def close_client(client: Client) -> None:
    """Close all connections: also those to sentinels, and those that a cluster's client opened and did not use."""
    await client.aclose()
    if isinstance(client, RedisCluster):
        for nodes in ("nodes_cache", "startup_nodes"):
            await client.nodes_manager.aclose(nodes)
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, SentinelConnectionPool):
        await pool.sentinel_manager.aclose()


def _client(address: Address, reply_timeout_s: float, sentinel_password: str) -> Client:
    options: dict[str, Any] = {
        "protocol": 3,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": reply_timeout_s,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.2), RETRIES),  # every write may be repeated
        "health_check_interval": 15,
        "max_connections": MAX_CONNECTIONS,
    }
    if not address.hosts:
        return Redis.from_url(address.url, **options)
    options |= _common(address)
    if address.cluster:
        return RedisCluster(startup_nodes=[ClusterNode(*host) for host in address.hosts], **options)
    return _primary(address, options, sentinel_password)


def _common(address: Address) -> dict[str, Any]:
    """User, password, database and TLS, as keyword arguments for every server."""
    read: dict[str, Any] = dict(parse_url(address.url))
    del read["host"]
    return read | ({"ssl": True} if read.pop("connection_class", None) else {})


def _primary(address: Address, options: dict[str, Any], password: str) -> Redis:
    """A client of the server that the sentinels name as primary."""
    server_only = {"username", "password", "db", "retry", "health_check_interval"}
    sentinel = {name: value for name, value in options.items() if name not in server_only}
    # No retries for one sentinel: the next one is asked, and the whole lookup is tried again.
    sentinel |= {"password": password or None, "retry": Retry(NoBackoff(), 0)}
    kind = _PrimaryTlsConnection if options.get("ssl") else _PrimaryConnection
    client: Redis = _Sentinels(address.hosts, sentinel_kwargs=sentinel).master_for(
        address.primary, connection_class=kind, **options
    )
    return client


class _Sentinels(Sentinel):
    """Sentinels with one lookup at a time: redis-py moves a sentinel that answers to the front of its list, and two
    lookups that do so at once can drop another sentinel for good."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
        self._one_at_a_time = asyncio.Lock()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        async with self._one_at_a_time:
            found: tuple[str, int] = await super().discover_master(service_name)
            return found


class _PrimaryConnection(SentinelManagedConnection):
    """Looks the primary up for each connection that it opens. redis-py does so only for a command's first try: a
    command that is repeated after a loss would go to the very server that was lost."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]
        await super().send_packed_command(command, check_health)


class _PrimaryTlsConnection(_PrimaryConnection, SSLConnection):
    pass


QUOTA_TIMEOUT_S = 1.0
QUOTA_RETRY_S = 1.0
QUOTA_PERIOD_MS = 60_000


class RedisQuota:
    """Use of API keys, counted for all gateways: one hash and one script for each key, by the server's clock.

    Each call is one round trip. While Redis fails, calls raise Unavailable at once, but for one try a second, so that
    no request waits for it longer than QUOTA_TIMEOUT_S; gateways count for themselves meanwhile.
    """

    def __init__(
        self, client: Client, *, gateway: str, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`lease_s`: seconds after which the sessions of a gateway that reports nothing are not counted any more."""
        self._gateway = gateway
        self._stale_ms = int(lease_s * 1000)
        self._clock = clock
        self._script = client.register_script(source("quota.lua"))
        self._numbers = itertools.count(1)
        """Numbers charges: one that is repeated is carried out once, and one that comes late not at all."""
        self._next_try = 0.0

    async def charge(self, key: str, demand: Demand) -> tuple[str, float]:
        if self._clock() < self._next_try:
            raise Unavailable("The shared count of API keys is away.", reason="STORE_UNAVAILABLE")
        requests = demand.requests, demand.all_requests, demand.requests_per_minute
        tokens = demand.tokens, demand.all_tokens, demand.tokens_per_minute
        sessions = demand.sessions, demand.all_sessions, demand.most_sessions
        words: list[str | int] = [self._gateway, next(self._numbers), self._stale_ms, QUOTA_PERIOD_MS]
        words += [*requests, *tokens, *sessions]
        try:
            async with typed_errors(), asyncio.timeout(QUOTA_TIMEOUT_S):
                refused, wait_ms = await cancellable(self._script(keys=[f"quota:{{{key}}}"], args=words))
        except Unavailable:
            self._next_try = self._clock() + QUOTA_RETRY_S
            raise
        return refused.decode(), int(wait_ms) / 1000
