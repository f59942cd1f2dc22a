"""Redis fails in the middle of texts: nothing that was shown is lost, repeated or changed.

Gateway, verifier and Redis are the real ones; only the model is emulated. The gateway runs `strict` unless a test says
otherwise: a token is shown once Redis has it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, running
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.redis import RedisStore
from gateway.store.session_log import RETRY_S
from gateway.store.session_store import SessionStore
from slipstream.engine.factory import open_engine
from slipstream.errors import SlipstreamError, Unavailable
from slipstream.rpc.channel import channel, error_of
from slipstream.v1 import gateway_pb2_grpc
from tests.support.fleet import emulated_text, until, verifier
from tests.support.follower import Follower
from tests.support.redis_server import RedisServer, redis_process, replicated
from tests.support.stores import connected, outcome, record, when_back

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
TARGET = "emulated:base_ms=4"
TOKENS = 160
TRIES = 2
"""Tries of a write during which nothing may be shown."""
GRACE_S = 0.3
MOST_TRIES = 2 + int(GRACE_S / RETRY_S)
"""Tries of a session's next write within that grace, and one that was under way."""
EARLY = 40
"""Tokens that were shown when the trouble begins: every session is in the middle of its text."""


@dataclass(frozen=True)
class Trouble:
    begin: Callable[[RedisServer], object]
    end: Callable[[RedisServer], object]
    options: tuple[str, ...] = ()


KEPT = ("--appendonly", "yes", "--appendfsync", "always")
"""With `everysec` Redis answers before it has written while a slow disk still syncs; what it kept back dies with it."""
TROUBLES = {
    "killed and restarted with its data": Trouble(RedisServer.kill, RedisServer.start, KEPT),
    "killed and restarted without data": Trouble(RedisServer.kill, RedisServer.start),
    "frozen": Trouble(RedisServer.freeze, RedisServer.thaw),
    "out of memory": Trouble(
        lambda server: server.ask("CONFIG", "SET", "maxmemory", 1),
        lambda server: server.ask("CONFIG", "SET", "maxmemory", 0),
    ),
    "made a replica": Trouble(
        lambda server: server.ask("REPLICAOF", "127.0.0.1", 1), lambda server: server.ask("REPLICAOF", "NO", "ONE")
    ),
}


@asynccontextmanager
async def system(on: SessionStore | None, **settings: Any) -> AsyncIterator[Any]:
    """A stub of a gateway with one verifier; without a store to be `on`, it opens the one that its settings name."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(verifier(open_engine(TARGET, kv_tokens=100_000)))
        config = GatewayConfig(
            verifiers=(target.address,), tokenizer=TOKENIZER, listen="127.0.0.1:0", grace_s=0.0, **settings
        )
        world = GatewayDependencies(random.Random(7).getrandbits, store=on)
        gateway = await stack.enter_async_context(running(config, world))
        await gateway.ready()
        line = await stack.enter_async_context(channel(gateway.address))
        yield gateway_pb2_grpc.GatewayServiceStub(line)


class Acknowledging(RedisStore):
    """Keeps what the server acknowledged of each log, and counts the tries of appends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.acknowledged: Counter[str] = Counter()
        """Tokens, prompt included."""
        self.tries: Counter[str] = Counter()

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        self.tries[session] += 1
        await super().append(session, epoch, start, tokens)
        self.acknowledged[session] = max(self.acknowledged[session], start + len(tokens))


@dataclass
class Scene:
    """A server, and a store on it whose patience suits a test."""

    server: RedisServer
    store: Acknowledging

    async def away(self) -> bool:
        return await outcome(self.store.create(record())) == "Unavailable"

    async def holds(self, follower: Follower) -> bool:
        """Whether the record is what its client was shown."""
        read = await when_back(lambda: self.store.read(follower.session_id))
        return list(read.tokens[read.prompt_length :]) == follower.tokens and bool(read.outcome)


@asynccontextmanager
async def scene(folder: Path, *options: str) -> AsyncIterator[Scene]:
    with redis_process(folder, *options) as server:
        async with connected(server.url, reply_timeout_s=0.2) as client:
            yield Scene(server, Acknowledging(client, owner="me", ttl_s=60, lease_s=60))


def follow(stub: Any, sessions: int = 3) -> list[Follower]:
    return [Follower(stub, [first, 8, 9], TOKENS) for first in range(sessions)]


def text(follower: Follower) -> list[int]:
    return emulated_text(follower.prompt, TOKENS)


async def in_the_middle(followers: list[Follower]) -> None:
    await until(lambda: all(len(follower.tokens) >= EARLY or follower.reading.done() for follower in followers))
    assert all(len(follower.tokens) < TOKENS for follower in followers)


async def ends(followers: list[Follower]) -> None:
    async with asyncio.timeout(120):
        await asyncio.gather(*(follower.reading for follower in followers))
    for follower in followers:
        assert follower.tokens == text(follower)


@pytest.mark.parametrize("kind", TROUBLES)
async def test_sessions_wait_for_a_store_in_trouble_and_lose_nothing(kind: str, tmp_path: Path) -> None:
    trouble = TROUBLES[kind]
    async with scene(tmp_path, *trouble.options) as there, system(there.store, store_grace_s=60.0) as stub:
        followers = follow(stub)
        await in_the_middle(followers)
        trouble.begin(there.server)
        assert await there.away()
        await nothing_is_shown(there.store, followers)
        trouble.end(there.server)
        await ends(followers)
        for follower in followers:
            assert await there.holds(follower)


async def nothing_is_shown(store: Acknowledging, followers: list[Follower]) -> None:
    """While every session tries again and again to write its next tokens, its client gets those that are in the log
    and no others."""
    began = Counter(store.tries)

    def waiting() -> bool:
        for follower in followers:
            assert len(follower.prompt) + len(follower.tokens) <= store.acknowledged[follower.session_id]
        return all(store.tries[each.session_id] >= began[each.session_id] + TRIES for each in followers)

    await until(waiting)
    assert all(len(follower.tokens) < TOKENS for follower in followers)


async def test_a_wall_clock_that_jumps_by_hours_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateway and verifier share this process, and each look at its wall clock finds it an hour ahead or behind."""
    looks, ahead_s = Counter[str](), cycle((3600, -3600, 0))
    seconds, nanoseconds = time.time, time.time_ns

    def jumping() -> float:
        looks["s"] += 1
        return seconds() + next(ahead_s)

    def jumping_ns() -> int:
        looks["ns"] += 1
        return nanoseconds() + next(ahead_s) * 10**9

    async with scene(tmp_path) as there:
        monkeypatch.setattr(time, "time", jumping)
        monkeypatch.setattr(time, "time_ns", jumping_ns)
        async with system(there.store, lease_s=3.0) as stub:
            followers = follow(stub)
            await ends(followers)
            for follower in followers:
                assert await there.holds(follower)
                assert (await there.store.read(follower.session_id)).epoch == 1, "its owner never lost it"
        assert looks["s"]


async def test_a_flushed_store_is_filled_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as there, system(there.store, store_grace_s=60.0) as stub:
        followers = follow(stub)
        await in_the_middle(followers)
        there.server.ask("FLUSHALL")
        await ends(followers)
        for follower in followers:
            assert await there.holds(follower)


@pytest.mark.parametrize("kind", TROUBLES)
async def test_trouble_beyond_the_grace_ends_sessions_typed_after_a_few_tries(kind: str, tmp_path: Path) -> None:
    trouble = TROUBLES[kind]
    async with scene(tmp_path, *trouble.options) as there, system(there.store, store_grace_s=GRACE_S) as stub:
        followers = follow(stub)
        await in_the_middle(followers)
        trouble.begin(there.server)
        began = Counter(there.store.tries)
        assert await there.away()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*(follower.reading for follower in followers), return_exceptions=True)
            with pytest.raises(grpc.RpcError) as refused:  # and no new session begins
                await Follower(stub, [1], 5).reading
        trouble.end(there.server)
        for error in (*ended, refused.value):
            assert isinstance(error, grpc.RpcError)
            typed: SlipstreamError = error_of(error)
            assert isinstance(typed, Unavailable) and typed.reason == "STORE_UNAVAILABLE"
        for follower in followers:
            # Not by the clock, which runs on where a busy machine stands still.
            assert there.store.tries[follower.session_id] - began[follower.session_id] <= MOST_TRIES
            assert follower.tokens == text(follower)[: len(follower.tokens)]
            if kind != "killed and restarted without data":
                read = await when_back(partial(there.store.read, follower.session_id))
                assert list(read.tokens[3 : 3 + len(follower.tokens)]) == follower.tokens


@pytest.mark.parametrize("kind", ["killed and restarted without data", "frozen"])
async def test_relaxed_sessions_go_on_and_their_records_follow(kind: str, tmp_path: Path) -> None:
    trouble = TROUBLES[kind]
    async with scene(tmp_path, *trouble.options) as there, system(there.store, durability="relaxed") as stub:
        followers = follow(stub)
        await in_the_middle(followers)
        trouble.begin(there.server)
        assert await there.away()
        await ends(followers)
        trouble.end(there.server)
        async with asyncio.timeout(60):
            for follower in followers:
                while await outcome(there.store.read(follower.session_id)) != "OK" or not await there.holds(follower):
                    await asyncio.sleep(0.02)


async def test_records_in_a_full_store_can_still_be_read(tmp_path: Path) -> None:
    async with scene(tmp_path) as there:
        made = record()
        await there.store.create(made)
        there.server.ask("CONFIG", "SET", "maxmemory", 1)
        assert await there.away()
        assert (await there.store.read(made.id)).tokens == made.tokens


class Watched(MemoryStore):
    """Counts the renewals of its sessions."""

    renewals = 0

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        await super().renew(session, epoch, length)
        self.renewals += 1


async def test_a_running_session_renews_its_lease_and_an_ended_one_does_not() -> None:
    store = Watched(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    async with system(store, lease_s=0.01) as stub:
        (follower,) = follow(stub, sessions=1)
        await ends([follower])
        renewals = store.renewals
        assert renewals > 0
        await asyncio.sleep(0.05)
        assert store.renewals == renewals


@pytest.mark.parametrize("fault", ["killed", "killed, with a replica that is behind", "frozen"])
async def test_sentinels_fail_over_in_the_middle_of_texts(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind = fault.endswith("behind")
    caplog.set_level(logging.WARNING, logger="gateway.store.session_log")
    with replicated(tmp_path) as redis:
        async with system(None, store=redis.url, store_grace_s=120.0) as stub:
            followers = follow(stub)
            if behind:  # what is written from now on is lost
                await until(lambda: all(follower.tokens for follower in followers))
                redis.replica.ask("REPLICAOF", "127.0.0.1", 1)
            await in_the_middle(followers)
            began, shown = time.monotonic(), [len(follower.tokens) for follower in followers]
            redis.hurry()
            redis.primary.freeze() if fault == "frozen" else redis.primary.kill()
            await until(lambda: all(len(f.tokens) > before for f, before in zip(followers, shown, strict=True)), 120.0)
            print(f"\n{fault}: all sessions go on after {time.monotonic() - began:.2f} s")
            await ends(followers)
        assert redis.promoted()
        assert ("put back" in caplog.text) >= behind
        async with connected(redis.replica.url) as client:
            there = Scene(redis.replica, Acknowledging(client, owner="reader", ttl_s=60, lease_s=60))
            for follower in followers:
                assert await there.holds(follower)


async def test_a_gateway_whose_store_never_answered_is_not_ready(tmp_path: Path) -> None:
    """A wrong address replaces no gateway that works: neither health checks nor `/ready` say that it can serve."""
    server = RedisServer(tmp_path)  # not started yet
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(verifier(open_engine(TARGET, kv_tokens=100_000)))
        config = GatewayConfig(
            verifiers=(target.address,), tokenizer=TOKENIZER, listen="127.0.0.1:0", http="127.0.0.1:0", store=server.url
        )
        gateway = await stack.enter_async_context(running(config, GatewayDependencies(random.Random(7).getrandbits)))
        ready = asyncio.create_task(gateway.ready())
        stack.callback(ready.cancel)
        await until(lambda: gateway.router.ready)
        line = await stack.enter_async_context(channel(gateway.address))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{gateway.server.http_address}"))
        checked = health_pb2_grpc.HealthStub(line).Check
        assert (await http.get("/ready")).status_code == 503
        assert (await checked(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await asyncio.to_thread(server.start)
        stack.callback(server.kill)
        await asyncio.wait_for(ready, 20.0)
        assert (await http.get("/ready")).status_code == 200
        assert (await checked(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
