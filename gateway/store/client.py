"""Connections to a Redis store: to one server, to the primary that sentinels name, or to a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import RedisError

from gateway.store.address import Address, parse, refusal

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0
RETRIES = 2
MAX_CONNECTIONS = 4096
"""To one server: every session may be writing at once, and none is refused for want of a connection."""

Client = Redis | RedisCluster


def connect(url: str, reply_timeout_s: float = REPLY_TIMEOUT_S, sentinel_password: str = "") -> Client:
    """A client that never waits for ever: without socket timeouts a frozen server would freeze every session.

    Raises InvalidArgument for an address that cannot be read (see `gateway.store.address`).
    """
    address = parse(url)
    try:
        client = _client(address, reply_timeout_s, sentinel_password)
        if isinstance(client, Redis):
            # Opens nothing; else the first request would find out.
            client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, RedisError) as error:  # of the options behind the address
        raise refusal(str(error)) from error
    return client


async def close(client: Client) -> None:
    """Give up all connections: those to sentinels, and those that a cluster's client made in vain."""
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
    """A client of whichever server the sentinels call primary."""
    of_server = {"username", "password", "db", "retry", "health_check_interval"}
    told = {name: value for name, value in options.items() if name not in of_server}
    # A sentinel that is away is passed over for the next one; the whole lookup is tried again.
    told |= {"password": password or None, "retry": Retry(NoBackoff(), 0)}
    kind = _PrimaryTlsConnection if options.get("ssl") else _PrimaryConnection
    client: Redis = _Sentinels(address.hosts, sentinel_kwargs=told).master_for(
        address.primary, connection_class=kind, **options
    )
    return client


class _Sentinels(Sentinel):
    """One lookup at a time. redis-py moves a sentinel that answers to the front: of two lookups that do so at once, one
    drops another sentinel for good."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
        self._one_at_a_time = asyncio.Lock()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        async with self._one_at_a_time:
            found: tuple[str, int] = await super().discover_master(service_name)
            return found


class _PrimaryConnection(SentinelManagedConnection):
    """Asks the sentinels for each connection that it opens. Without this, a command that is repeated after a loss goes
    to the very server that was lost: redis-py asks them only for a command's first try."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]
        await super().send_packed_command(command, check_health)


class _PrimaryTlsConnection(_PrimaryConnection, SSLConnection):
    pass
