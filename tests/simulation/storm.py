"""The faults of a world: which ones, on which parties, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from tests.simulation.network import Weather
from tests.simulation.world import World

STORM_S = 6.0
Storm = Fault = Callable[[World], Coroutine[Any, Any, None]]


def _count(world: World, what: str) -> None:
    world.network.counts[what] += 1


async def kill(world: World) -> None:
    name = world.chance.choice([*world.alive])
    if world.alive[name].party.frozen:
        return
    world.kill(name)
    _count(world, f"{name.split()[0]} killed")
    await asyncio.sleep(world.chance.uniform(0.0, 1.5))
    world.start(name)


async def drain(world: World) -> None:
    name = world.chance.choice([*world.alive])
    if name in world.leaving:
        return
    _count(world, f"{name.split()[0]} drained")
    if await world.drain(name):
        await asyncio.sleep(world.chance.uniform(0.0, 0.5))
        world.start(name)


async def freeze(world: World) -> None:
    name = world.chance.choice([*world.alive, *world.clients])
    party = world.party(name)
    if party.frozen:
        return
    world.network.note("freeze", name)
    party.freeze()
    _count(world, f"{name.split()[0]} frozen")
    await asyncio.sleep(world.chance.choice((0.1, 1.0, 3.0, 6.0)) * world.chance.uniform(0.5, 1.5))
    world.network.note("thaw", name)
    party.thaw()


async def block(world: World) -> None:
    one, other = world.chance.sample([*world.names, *world.clients], 2)
    ways = [(one, other), (other, one)][: world.chance.randint(1, 2)]
    for way in ways:
        world.network.block(*way)
    _count(world, "partitions")
    await asyncio.sleep(world.chance.choice((0.1, 1.0, 5.0)) * world.chance.uniform(0.5, 1.5))
    for way in ways:
        world.network.unblock(*way)


async def reset(world: World) -> None:
    live = list(world.network.streams.values())
    if live:
        one, other = world.chance.choice(live).parties
        world.network.reset(one.name, other.name)
        _count(world, "resets")
    await asyncio.sleep(0)


async def lose_store(world: World) -> None:
    world.store.away = True
    world.network.note("store away")
    _count(world, "store away")
    await asyncio.sleep(world.chance.uniform(0.1, 1.5))
    world.store.away = False


async def fail_over(world: World) -> None:
    world.store.fail_over(world.chance.randint(0, 3))
    _count(world, "store failed over")
    await asyncio.sleep(0)


async def forget(world: World) -> None:
    world.store.forget()
    _count(world, "store forgot all")
    await asyncio.sleep(0)


async def fail_passes(world: World) -> None:
    """Passes in a row, so that the first ones hold several sessions and the later ones their halves."""
    verifiers = world.of(world.verifiers)
    if verifiers:
        world.chance.choice(verifiers).engine.failing = world.chance.randint(1, 6)
        _count(world, "passes failed")
    await asyncio.sleep(0)


async def break_device(world: World) -> None:
    verifiers = world.of(world.verifiers)
    if not verifiers:
        return
    verifier = world.chance.choice(verifiers)
    verifier.engine.broken = True
    _count(world, "devices broken")
    await asyncio.sleep(world.chance.choice((0.05, 0.5, 2.0)))
    verifier.engine.broken = False


FAULTS: tuple[tuple[Fault, float], ...] = (
    (kill, 3.0),
    (drain, 2.0),
    (freeze, 3.0),
    (block, 3.0),
    (reset, 2.0),
    (fail_passes, 3.0),
    (break_device, 1.0),
    (lose_store, 1.0),
    (fail_over, 1.0),
    (forget, 0.3),
)


HONEST = {"dropped": 0.0, "repeated": 0.0, "overtaken": 0.0}


def weather(world: World) -> Weather:
    """Three in four networks keep gRPC's promises; the fourth drops, repeats and reorders what it carries."""
    chance = world.chance
    drawn = Weather(late=chance.choice((0.0, 0.02, 0.05)))
    if chance.random() < 0.25:
        drawn.dropped, drawn.repeated, drawn.overtaken = (chance.choice((0.0, 0.01, 0.04)) for _ in range(3))
    return drawn


async def honest_storm(world: World) -> None:
    """On a network that keeps gRPC's promises."""
    await storm(world, honest=True)


async def storm(world: World, *, honest: bool = False) -> None:
    """Faults come one after the other and on top of each other; then all is mended."""
    await asyncio.sleep(world.chance.uniform(0.1, 1.0))
    world.network.weather = replace(weather(world), **HONEST) if honest else weather(world)
    world.store.failing = world.chance.choice((0.0, 0.02, 0.1))
    faults, weights = zip(*FAULTS, strict=True)
    pause_s = world.chance.choice((0.2, 0.5, 1.5))
    async with asyncio.TaskGroup() as under_way:
        while world.loop.time() < STORM_S:
            await asyncio.sleep(world.chance.expovariate(1.0 / pause_s))
            (fault,) = world.chance.choices(faults, weights)
            under_way.create_task(fault(world))
    clear_up(world)


async def restarts(world: World) -> None:
    """Every party ends in good order and starts again, one after the other, while the store has to be asked
    again now and then; nothing else happens."""
    world.store.failing = 0.1
    for name in world.names:
        await asyncio.sleep(world.chance.uniform(0.0, 0.3))
        if await world.drain(name):
            _count(world, "restarts")
            world.start(name)
    world.store.failing = 0.0


async def calm(world: World) -> None:
    """Nothing happens."""
    await asyncio.sleep(0.1)


def clear_up(world: World) -> None:
    """The network heals. Whatever stood between two parties and dropped or repeated frames is taken away, and the
    connections through it break."""
    drawn = world.network.weather
    if drawn.dropped or drawn.repeated or drawn.overtaken:
        for stream in list(world.network.streams.values()):
            world.network.break_off(stream)
    world.network.weather = Weather()
    world.store.failing, world.store.away = 0.0, False
