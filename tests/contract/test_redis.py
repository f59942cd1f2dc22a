"""What only a store of servers can get wrong: keys, scripts, replicas, clusters, and servers that do not answer."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.crc import key_slot
from redis.exceptions import ConnectionError

from gateway.store.address import Address, parse
from gateway.store.quota import Demand
from gateway.store.redis import RedisQuota, RedisStore, connect
from gateway.store.session_store import SessionRecord
from slipstream.errors import FailedPrecondition, InvalidArgument, Unavailable
from tests.support.certificates import Authority
from tests.support.loopback_addresses import HOST
from tests.support.network_relay import Network
from tests.support.redis_server import cluster, eventually, redis_process
from tests.support.stores import PROMPT, connected, keys, outcome, record, redis_world, when_back


async def test_every_key_in_redis_has_a_time_to_live(redis_url: str) -> None:
    async with connected(redis_url) as client:
        store, made = redis_world(client).store(ttl_s=60.0), record()
        await store.create(made)
        await store.append(made.id, 1, 3, [7])
        await store.truncate(made.id, 2, 3)
        for key in keys(made.id):
            assert 0 < await client.pttl(key) <= 60_000


async def test_a_record_with_one_of_its_two_keys_evicted_is_not_found(redis_url: str) -> None:
    """A server that evicts keys may take one of the two."""
    async with connected(redis_url) as client:
        store, made = redis_world(client).store(), record()
        for evicted in keys(made.id):
            await store.restore(made)
            await client.delete(evicted)
            for operation in (store.append(made.id, 1, 3, [7]), store.renew(made.id, 1), store.read(made.id)):
                assert await outcome(operation) == "NotFound"
            with pytest.raises(FailedPrecondition):
                await redis_world(client).store("b").create(made)
        await store.restore(made)
        assert (await store.read(made.id)).tokens == PROMPT


async def test_scripts_are_loaded_again_when_the_server_forgot_them(redis_url: str) -> None:
    async with connected(redis_url) as client:
        store, made = redis_world(client).store(), record()
        await store.create(made)
        await store.append(made.id, 1, 3, [7])
        await client.script_flush()
        await store.append(made.id, 1, 4, [8])
        assert (await store.read(made.id)).tokens == (*PROMPT, 7, 8)


async def test_the_keys_of_a_session_share_a_slot_of_a_cluster(redis_url: str) -> None:
    async with connected(redis_url) as client:
        for _ in range(8):
            made = record()
            await redis_world(client).store().create(made)
            names = [name async for name in client.scan_iter(f"*{made.id}*")]
            assert len(names) == 2
            assert {key_slot(name) for name in names} == {key_slot(made.id.encode())}


async def test_after_a_failover_no_takeover_waits_for_a_lease_by_a_clock_that_was_ahead(redis_url: str) -> None:
    """A server's clock cannot be set: the lease is given the times of a primary an hour ahead."""
    async with connected(redis_url) as client:
        world, made = redis_world(client), record()
        first, second = world.store("a", lease_s=20.0), world.store("b", lease_s=20.0)

        async def fail_over() -> None:
            for field in ("lease", "leased_at"):
                await client.hincrby(keys(made.id)[0], field, 3_600_000)

        await first.create(made)
        await fail_over()
        await first.renew(made.id, 1)  # the owner lives
        assert await outcome(second.takeover(made.id)) == "Aborted"
        await fail_over()
        assert not (await second.read(made.id)).leased
        taken = await second.takeover(made.id)
        assert (taken.owner, taken.epoch) == ("b", 2) and 15.0 < taken.lease_s <= 20.0


async def test_a_store_that_is_down_is_typed_unavailable() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        host = f"127.0.0.1:{probe.getsockname()[1]}"
        for url in (f"redis://{host}", f"redis+sentinel://{host},{host}/sessions", f"redis+cluster://{host}"):
            async with connected(url) as client:
                store = redis_world(client).store()
                for operation in (store.create(record()), store.append("x", 1, 0, [1]), store.read("x")):
                    with pytest.raises(Unavailable) as caught:
                        await operation
                    assert caught.value.reason == "STORE_UNAVAILABLE"


async def test_a_store_that_accepts_and_never_answers_is_typed_unavailable_in_bounded_time() -> None:
    gone = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for url in (f"redis://{host}", f"redis+sentinel://{host}/sessions", f"redis+cluster://{host}"):
            async with connected(url, reply_timeout_s=0.05) as client, asyncio.timeout(60):
                with pytest.raises(Unavailable):
                    await redis_world(client).store().append("x", 1, 0, [1])
        gone.set()


@pytest.mark.parametrize("operation", ["a write", "a look at the memory"])
async def test_an_operation_can_be_cancelled_at_any_time(redis_url: str, operation: str) -> None:
    async with connected(redis_url) as client:
        store = redis_world(client).store()
        await store.create(made := record())

        async def run_and_wait() -> None:
            await (store.renew(made.id, 1) if operation == "a write" else store.memory_usage())
            await asyncio.Event().wait()

        for turns in range(40):  # of the event loop; some more than it takes
            running = asyncio.create_task(run_and_wait())
            for _ in range(turns):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running], timeout=60)
            assert running.cancelled(), f"went on after {turns} turns"


async def test_hundreds_of_sessions_write_at_once(redis_url: str) -> None:
    async with connected(redis_url) as client:
        store = redis_world(client).store()
        assert set(await asyncio.gather(*(outcome(store.create(record())) for _ in range(150)))) == {"OK"}


async def test_a_cluster_holds_sessions_on_all_its_nodes_and_misses_those_of_a_dead_one(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        async with connected(f"redis+cluster://{HOST}:{nodes[0].port},{HOST}:{nodes[1].port}") as client:
            first, second = (RedisStore(client, owner=owner, ttl_s=60, lease_s=0) for owner in "ab")
            for tokens in range(16):
                made = _numbered(tokens)  # by chance alone one node of the three might get none
                await first.create(made)
                await first.append(made.id, 1, 3, [7, tokens])
                await first.truncate(made.id, 2, 4)
                taken = await second.takeover(made.id)
                assert (taken.epoch, taken.tokens) == (3, (*PROMPT, 7))
                assert await outcome(first.append(made.id, 2, 4, [9])) == "Aborted"
                quota = RedisQuota(client, gateway="g", lease_s=60)
                demands = [Demand(tokens=60, all_tokens=total, tokens_per_minute=100) for total in (60, 120)]
                assert [(await quota.charge(made.id, demand))[0] for demand in demands] == ["", "tokens"]
            assert all(node.ask("DBSIZE") for node in nodes)
            for node, most in zip(nodes, (1 << 30, 1 << 26, 1 << 28), strict=True):
                node.ask("CONFIG", "SET", "maxmemory", most)
            assert (await first.memory_usage()).max_bytes == 1 << 26  # the fullest
            nodes[0].ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            told = await first.memory_usage()
            assert (told.max_bytes, told.policy, told.evicts) == (1 << 30, "allkeys-lru", True)
            nodes[2].kill()
            lost = next(made for made in map(_numbered, range(99)) if key_slot(keys(made.id)[0].encode()) > 12_000)
            async with asyncio.timeout(60):
                assert await outcome(first.create(lost)) == "Unavailable"


def _numbered(number: int) -> SessionRecord:
    return record(id=f"{number:032x}")


async def test_a_write_is_done_when_enough_replicas_have_it(tmp_path: Path) -> None:
    with redis_process(tmp_path / "primary") as primary, redis_process(tmp_path / "replica") as replica:
        async with connected(primary.url) as client:
            store = RedisStore(client, owner="a", ttl_s=60, lease_s=60, replicas=1)
            made = record()
            with pytest.raises(Unavailable) as caught:
                await store.create(made)
            assert caught.value.reason == "NOT_REPLICATED"
            replica.ask("REPLICAOF", HOST, primary.port)
            eventually(lambda: replica.replication()["master_link_status"] == "up")
            await client.script_flush()
            await when_back(lambda: store.create(made))
            async with connected(replica.url) as there:
                assert (await RedisStore(there, owner="x", ttl_s=60, lease_s=60).read(made.id)).tokens == PROMPT
            replica.freeze()
            assert await outcome(store.append(made.id, 1, 9, [7])) == "OutOfRange"  # nothing was written
            assert await outcome(store.append(made.id, 1, 3, [7])) == "Unavailable"
            replica.thaw()
            await when_back(lambda: store.append(made.id, 1, 3, [7]))


async def test_a_write_that_a_lost_primary_did_not_answer_is_repeated_on_the_next_one(tmp_path: Path) -> None:
    with redis_process(tmp_path / "first") as first, redis_process(tmp_path / "second") as second:
        async with connected("redis+sentinel://127.0.0.1:1/main", reply_timeout_s=0.5) as client:
            primary = first

            async def discover(_: str) -> tuple[str, int]:
                return HOST, primary.port

            client.connection_pool.sentinel_manager.discover_master = discover
            store = RedisStore(client, owner="a", ttl_s=60, lease_s=60)
            await store.create(record())
            first.freeze()
            primary, made = second, record()
            await store.create(made)
        async with connected(second.url) as client:
            found = await client.exists(*keys(made.id)), await client.info("replication"), await client.dbsize()
            assert found[0] == 2 and second.process.poll() is None, found


async def test_lookups_at_once_forget_no_sentinel() -> None:
    async def away() -> dict[str, Any]:
        await asyncio.sleep(0)
        raise ConnectionError

    async def here() -> dict[str, Any]:
        await asyncio.sleep(0)
        state = {"ip": "10.0.0.1", "port": 7, "is_master": True, "is_sdown": False, "is_odown": False}
        return {"main": state | {"num-other-sentinels": 1}}

    async with connected("redis+sentinel://a:1,b:2/main") as client:
        manager = client.connection_pool.sentinel_manager
        first, second = manager.sentinels
        first.sentinel_masters, second.sentinel_masters = away, here
        assert await asyncio.gather(*(manager.discover_master("main") for _ in range(3))) == [("10.0.0.1", 7)] * 3
        assert set(manager.sentinels) == {first, second}


@pytest.mark.parametrize(
    ("text", "hosts", "primary", "url"),
    [
        ("redis://h:1/2", (), "", "redis://h:1/2"),
        ("rediss://u:p@h:1/2?ssl_cert_reqs=none", (), "", "rediss://u:p@h:1/2?ssl_cert_reqs=none"),
        ("redis+sentinel://a:1,b/main/3", (("a", 1), ("b", 26379)), "main", "redis://localhost/3"),
        ("rediss+sentinel://u:p%40@[::1]:1/main", (("::1", 1),), "main", "rediss://u:p%40@localhost/0"),
        ("redis+cluster://u:p@a,[::1]?x=1", (("a", 6379), ("::1", 6379)), "", "redis://u:p@localhost/0?x=1"),
    ],
)
def test_addresses_are_read(text: str, hosts: tuple[tuple[str, int], ...], primary: str, url: str) -> None:
    assert parse(text) == Address(url, hosts, primary)


@pytest.mark.parametrize(
    "text",
    [
        "localhost:6379",
        "http://a:1",
        "redis+other://a:1",
        "unix+sentinel://a:1/main",
        "redis+sentinel://a:1",
        "redis+sentinel://a:1,/main",
        "redis+sentinel://a:b/main",
        "redis+sentinel://a:1/main/x",
        "redis+cluster://a:1/main",
        "redis+cluster://a:70000",
        "redis+sentinel://[::1:26379/main",
        "redis://[::1:6379/0",
        "redis://a:70000/0",
        "redis://a:six/0",
    ],
)
def test_addresses_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="GATEWAY_STORE"):
        parse(text)


def test_a_password_that_is_not_escaped_is_not_quoted() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse("redis://:hunter2/x@host:6379/0")
    assert "hunter2" not in refusal.value.message and refusal.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    ["rediss://me:secret@a:1/2", "rediss+sentinel://me:secret@a:1/main/2", "rediss+cluster://me:secret@a:1"],
)
async def test_password_and_tls_hold_for_every_server(url: str) -> None:
    async with connected(url, sentinel_password="other") as client:
        pool = getattr(client, "connection_pool", None)
        options = client.connection_kwargs if pool is None else pool.connection_kwargs
        kind = options["connection_class"] if pool is None else pool.connection_class
        assert (options["username"], options["password"]) == ("me", "secret")
        assert issubclass(kind, SSLConnection)
        if isinstance(pool, SentinelConnectionPool):
            (sentinel,) = pool.sentinel_manager.sentinels
            assert sentinel.connection_pool.connection_kwargs["password"] == "other"
            assert sentinel.connection_pool.connection_kwargs.get("username") is None
            assert issubclass(sentinel.connection_pool.connection_class, SSLConnection)
            assert options["db"] == 2


async def test_a_server_that_asks_for_a_password_behind_tls(tmp_path: Path) -> None:
    """TLS ends before the server, as with stunnel: not every build of it has TLS itself."""
    own, others = Authority(), Authority("another CA")
    folder = own.issue(tmp_path / "server", "localhost")
    trusting, doubting = folder / "ca.crt", others.issue(tmp_path / "other", "localhost") / "ca.crt"
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    network = Network(lambda: {"gateway": os.getpid()})
    with redis_process(tmp_path, "--requirepass", "secret") as server:
        door = await network.door("store", f"{HOST}:{server.port}", tls)
        place = f"localhost:{door.rpartition(':')[2]}"
        for url, expected in (
            (f"rediss://:secret@{place}?ssl_ca_certs={trusting}", "OK"),
            (f"rediss://:wrong@{place}?ssl_ca_certs={trusting}", "Unavailable"),
            (f"rediss://{place}?ssl_ca_certs={trusting}", "Unavailable"),
            (f"rediss://:secret@{place}?ssl_ca_certs={doubting}", "Unavailable"),
            (f"redis://:secret@{place}", "Unavailable"),
            (f"redis://:secret@{HOST}:{server.port}", "OK"),
        ):
            async with connected(url) as client:
                create = partial(redis_world(client).store().create, record())
                assert await outcome(when_back(create) if expected == "OK" else create()) == expected
        assert network.way("gateway", "store").back.passed
    await network.close()


@pytest.mark.parametrize("scheme", ["redis://a", "redis+cluster://a", "redis+sentinel://a/main"])
@pytest.mark.parametrize("option", ["socket_timeout=soon", "colour=red"])
def test_options_that_cannot_be_read_are_refused(scheme: str, option: str) -> None:
    with pytest.raises(InvalidArgument, match=f"GATEWAY_STORE.*{option.partition('=')[0]}"):
        connect(f"{scheme}?{option}")


def test_options_of_tls_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"GATEWAY_STORE.*odd"):
        connect("rediss://a?ssl_cert_reqs=odd")
