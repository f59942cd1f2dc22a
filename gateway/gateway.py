"""The gateway as one process: its parts put together, started and ended in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from gateway.breaker import Tolerance
from gateway.config import GatewayConfig
from gateway.drafters import Drafter
from gateway.log import Scribe
from gateway.routing import Router
from gateway.service import GatewayService
from gateway.session import Stage
from gateway.sessions import Chance, Sessions
from gateway.store import SessionStore
from gateway.store.memory import Memory, MemoryStore
from gateway.tokenizer import Tokenizer
from gateway.verifiers import Dial, Verifier
from slipstream.client import channel
from slipstream.interpreter import tune
from slipstream.server import Server, until_signal
from slipstream.vocabulary import load_tokenizer

log = logging.getLogger(__name__)

TOLD_S = 1.0
"""For the last word to clients, when a gateway ends."""


@dataclass(frozen=True, slots=True)
class World:
    """What lies outside the process: replaced in tests."""

    chance: Chance
    dial: Dial = channel
    store: SessionStore | None = None
    """None: the one that the configuration names."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    address: str
    router: Router
    sessions: Sessions
    server: Server
    tokenizer: Tokenizer

    async def ready(self) -> None:
        """Wait until some verifier can serve, then tell health checks."""
        while not any(verifier.ready for verifier in self.router.verifiers):
            await self.router.news()
        for model in [verifier.model for verifier in self.router.verifiers if verifier.model is not None]:
            await self.tokenizer.prepare(model)
        await self.server.serving(True)


@asynccontextmanager
async def running(config: GatewayConfig, world: World) -> AsyncIterator[Gateway]:
    """A gateway that listens; at the end its running sessions have `grace_s` to finish, and are let go then."""
    tokenizer = Tokenizer(await asyncio.to_thread(load_tokenizer, config.tokenizer), config.max_prompt_bytes)
    async with AsyncExitStack() as stack:
        store = world.store or _open_store(config, world.chance)
        stack.push_async_callback(store.close)
        router = _router(config, world, tokenizer.fingerprint)
        for worker in router.workers:
            stack.push_async_callback(worker.close)
        scribe = Scribe() if config.durability == "relaxed" else None
        stage = Stage(config, router)
        sessions = Sessions(stage, tokenizer, store, scribe, world.chance)
        server = Server([GatewayService(stage, tokenizer, sessions).register])
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(worker.run()) for worker in router.workers]
            loops.append(tasks.create_task(sessions.keep_leases()))
            if scribe is not None:
                loops.append(tasks.create_task(scribe.run()))
            try:
                yield Gateway(await server.start(config.listen), router, sessions, server, tokenizer)
            finally:
                await _drained(server, sessions, config.grace_s)
                await _written(scribe, config.store_grace_s)
                for loop in loops:
                    loop.cancel()


async def serve(config: GatewayConfig) -> None:
    """Until SIGTERM or SIGINT; says on standard output when it can serve."""
    async with running(config, World(Chance(secrets.randbits))) as gateway, asyncio.TaskGroup() as tasks:
        ready = tasks.create_task(_announce(gateway))
        tune()
        await until_signal()
        ready.cancel()


async def _announce(gateway: Gateway) -> None:
    await gateway.ready()
    print(f"ready grpc={gateway.address}", flush=True)


def _open_store(config: GatewayConfig, chance: Chance) -> SessionStore:
    owner = f"{chance.random_bits(64):016x}"
    if config.store == "memory":
        return MemoryStore(Memory(chance.clock), owner=owner, ttl_s=config.session_ttl_s, lease_s=config.lease_s)
    # Imported here: on one machine without Redis its client is not needed.
    from gateway.store.client import connect
    from gateway.store.redis import RedisStore

    client = connect(config.store, sentinel_password=config.store_sentinel_password)
    times = {"ttl_s": config.session_ttl_s, "lease_s": config.lease_s}
    return RedisStore(client, owner=owner, replicas=config.store_replicas, **times)


def _router(config: GatewayConfig, world: World, fingerprint: str) -> Router:
    dial, router = world.dial, Router(world.chance.clock)
    router.verifiers = [Verifier(address, dial, fingerprint, router.changed) for address in config.verifiers]
    tolerance = Tolerance(config.breaker_window_s, config.breaker_cool_down_s, config.breaker_longest_cool_down_s)
    for entry in config.drafters:
        name, _, address = entry.partition("=")
        trusted = name in config.trusted_drafters
        router.drafters.append(Drafter(name, address, trusted, dial(address), router.changed, tolerance))
    return router


async def _drained(server: Server, sessions: Sessions, grace_s: float) -> None:
    """Sessions have `grace_s` to finish; those that have not are let go, and their clients told to resume them."""
    stopping = asyncio.create_task(server.stop(grace_s + TOLD_S))
    await asyncio.wait([stopping], timeout=grace_s)
    await sessions.close()
    await stopping


async def _written(scribe: Scribe | None, grace_s: float) -> None:
    """Give what relaxed sessions left behind a chance to be written."""
    if scribe is None:
        return
    try:
        async with asyncio.timeout(grace_s):
            await scribe.idle()
    except TimeoutError:
        log.error("the session store is away; the last tokens of relaxed sessions are not in it")
