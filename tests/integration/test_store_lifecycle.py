"""A store over its life: what a session takes and when it is gone, memory that fills and a policy that drops sessions,
and a backup from which sessions go on."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest
import redis

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, running
from gateway.store.measured import MeasuredStore
from gateway.store.redis import RedisStore
from slipstream.errors import FailedPrecondition, Unavailable
from slipstream.v1 import gateway_pb2
from tests.integration.test_store_faults import TOKENIZER, TOKENS, system
from tests.support.fleet import emulated_text, until
from tests.support.follower import Follower
from tests.support.gateway_process import gateway_process
from tests.support.redis_server import redis_process
from tests.support.scraping import scrape
from tests.support.stores import connected, record

SESSIONS, PROMPT_TOKENS, OUTPUT_TOKENS = 200, 300, 1200


def log_bytes(tokens: int, params: int) -> int:
    """The formula of docs/deployment.md, *The store*: 4 bytes a token, as much again for growth, the request, and two
    keys with their fields."""
    return 2 * 4 * tokens + params + 2048


async def test_a_session_takes_the_documented_memory_and_expires(tmp_path: Path) -> None:
    with redis_process(tmp_path) as server, redis.Redis.from_url(server.url) as asked:
        async with connected(server.url) as client:
            store = RedisStore(client, owner="a", ttl_s=3600.0, lease_s=10.0)
            before = asked.info("memory")["used_memory"]
            for _ in range(SESSIONS):
                made = record(prompt_length=PROMPT_TOKENS, tokens=tuple(range(PROMPT_TOKENS)), params=b"x" * 200)
                await store.create(made)
                for start in range(PROMPT_TOKENS, PROMPT_TOKENS + OUTPUT_TOKENS, 40):
                    await store.append(made.id, made.epoch, start, list(range(40)))
            taken = (asked.info("memory")["used_memory"] - before) / SESSIONS
        most = log_bytes(PROMPT_TOKENS + OUTPUT_TOKENS, 200)
        print(f"{taken:.0f} bytes a session, at most {most}")
        assert 4 * (PROMPT_TOKENS + OUTPUT_TOKENS) < taken < most
        left = [asked.pttl(key) for key in asked.scan_iter("*:*")]
        assert len(left) == 2 * SESSIONS and all(0 < each <= 3_600_000 for each in left)


LIMITED = ("--maxmemory", "64mb", "--maxmemory-policy")


async def test_a_store_that_drops_sessions_is_logged_once_and_refused_if_that_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_process(tmp_path, *LIMITED, "volatile-lru") as server:
        async with connected(server.url) as client:
            store = MeasuredStore(RedisStore(client, owner="a", ttl_s=60.0, lease_s=10.0))
            for _ in range(2):
                await store.look()
            assert [each.getMessage().partition(" (")[2] for each in caplog.records] == [
                "maxmemory-policy volatile-lru); set it to noeviction."
            ]
            with pytest.raises(FailedPrecondition, match="noeviction") as refused:
                await store.require_no_eviction()
            assert refused.value.reason == "STORE_EVICTS"
            for setting, value in (("maxmemory", 0), ("maxmemory-policy", "noeviction"), ("maxmemory", 1 << 26)):
                server.ask("CONFIG", "SET", setting, value)
                await store.require_no_eviction()
            server.kill()
            await store.look()
            assert store.memory is None
            with pytest.raises(Unavailable):
                await store.memory_usage()
            waiting = asyncio.create_task(store.require_no_eviction())
            server.start()  # with its options, so it drops sessions again
            with pytest.raises(FailedPrecondition, match="volatile-lru"):
                await waiting


async def test_a_store_that_hides_its_eviction_policy_serves_sessions_and_may_be_refused(tmp_path: Path) -> None:
    with redis_process(tmp_path, *LIMITED, "noeviction") as server:
        server.ask("ACL", "SETUSER", "gateway", "on", ">word", "~*", "+@all", "-info")
        async with connected(server.url.replace("//", "//gateway:word@")) as client:
            store = MeasuredStore(RedisStore(client, owner="a", ttl_s=60.0, lease_s=10.0))
            with pytest.raises(FailedPrecondition, match="permit the command INFO"):
                await store.require_no_eviction()
            await store.create(record())


async def test_a_gateway_reports_its_stores_memory(tmp_path: Path) -> None:
    with redis_process(tmp_path, *LIMITED, "noeviction") as server:
        free = "127.0.0.1:0"
        config = GatewayConfig(("127.0.0.1:1",), TOKENIZER, listen=free, metrics_listen=free, store=server.url)
        async with running(config, GatewayDependencies(random.Random(7).getrandbits)) as gateway:
            await until(lambda: gateway.store.memory is not None)
            page = await scrape(gateway.server.metrics_address)
    names = "memory_max_bytes", "evicts", "memory_used_bytes"
    most, evicts, used = (page.value(f"slipstream_store_{name}") for name in names)
    assert (most, evicts) == (1 << 26, 0) and 0 < used < most


async def test_a_gateway_that_refuses_its_store_ends(tmp_path: Path, folder: Path) -> None:
    with redis_process(tmp_path, *LIMITED, "allkeys-lru") as server:
        settings = {"store": server.url, "store_eviction": "refuse"}
        async with gateway_process(folder, "127.0.0.1:1", **settings) as process, asyncio.timeout(120):
            assert await process.wait() == 1


async def test_sessions_go_on_from_a_backup(tmp_path: Path) -> None:
    """One that had ended, and one in the middle of its text, whose gateway and store are both gone."""
    with redis_process(tmp_path / "first", "--appendonly", "yes") as server:
        async with system(None, store=server.url) as stub:
            ended = Follower(stub, [3, 8, 9], TOKENS)
            await ended.reading
            broken = Follower(stub, [4, 8, 9], TOKENS)
            await until(lambda: len(broken.tokens) > 40)
            server.ask("SAVE")
        shutil.copy(tmp_path / "first" / "dump.rdb", tmp_path)
    (tmp_path / "second").mkdir()
    shutil.move(tmp_path / "dump.rdb", tmp_path / "second")
    # A server with a log reads that alone: it begins without one, and is told to write one from now on.
    with redis_process(tmp_path / "second") as restored:
        restored.ask("CONFIG", "SET", "appendonly", "yes")
        async with system(None, store=restored.url) as stub:
            for text in (ended, broken):
                request = gateway_pb2.ResumeRequest(session_id=text.session_id)
                tokens = [token async for event in stub.Resume(request) for token in event.delta.token_ids]
                assert tokens == emulated_text(text.prompt, TOKENS)
