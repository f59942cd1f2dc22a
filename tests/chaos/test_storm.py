"""Faults at random, one after the other and on top of each other, while texts come and go.

`CHAOS_S` seconds of it (60), from `CHAOS_SEED` (drawn, and printed). Which faults come and when is a function of the
seed; what they hit is not, for the processes are real.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from tests.chaos.cluster import Cluster, Part, Text, cluster
from tests.chaos.faults import PAIRS
from tests.support.impaired_connection import Way

pytestmark = pytest.mark.mended_faults
SECONDS = float(os.environ.get("CHAOS_S", "60"))
SEED = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
AT_ONCE, TOKENS = 8, 120


Strike = Callable[[random.Random], Coroutine[Any, Any, str]]


async def strike_part(part: Part, chance: random.Random) -> str:
    if chance.random() < 0.5:
        await part.kill()
        await asyncio.sleep(chance.uniform(0.0, 2.0))
        await part.start()
        return f"{part.role.module} killed"
    await part.freeze()
    await asyncio.sleep(chance.uniform(0.2, 5.0))
    await part.thaw()
    return f"{part.role.module} frozen"


async def strike_store(system: Cluster, chance: random.Random) -> str:
    if chance.random() < 0.5:
        system.redis.kill()
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        await asyncio.to_thread(system.redis.start)
        return "store killed with its data"
    system.redis.freeze()
    await asyncio.sleep(chance.uniform(0.2, 1.5))
    system.redis.thaw()
    return "store frozen"


async def strike_way(way: Way, chance: random.Random) -> str:
    what = chance.choice(("cut", "half cut", "reset", "slow"))
    if what == "reset":
        way.reset()
        return "connections reset"
    lanes = way.lanes if what == "cut" else [chance.choice(way.lanes)]
    for lane in lanes if what != "slow" else []:
        lane.cut()
    if what == "slow":
        way.slow(delay_s=chance.uniform(0.0, 0.1), bytes_per_s=1e5)
    await asyncio.sleep(chance.uniform(0.2, 5.0))
    way.heal()
    return f"way {what}"


async def storm(name: str, strike: Strike, until: float, struck: Counter[str]) -> None:
    """Strikes one part, one way, or the store, again and again."""
    chance = random.Random(f"{SEED} {name}")
    while True:
        await asyncio.sleep(chance.uniform(2.0, 20.0))
        if time.monotonic() > until:
            return
        struck[await strike(chance)] += 1


async def talk(system: Cluster, over: Callable[[], bool], said: list[Text]) -> None:
    while not over():
        (text,) = await system.say(1, TOKENS)
        completion = await text.running
        assert completion.token_ids == text.expected()
        said.append(text)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_process_is_replaced_in_turn_and_no_client_sees_an_error() -> None:
    said, ending = list[Text](), dict[str, float]()
    async with cluster() as system:
        replaced = asyncio.Event()

        async def upgrade() -> None:
            for part in system.parts:
                ending[part.name] = await part.replace()
                await asyncio.sleep(1.0)
            replaced.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(upgrade())
            for _ in range(AT_ONCE):
                tasks.create_task(talk(system, replaced.is_set, said))
        await system.at_rest()
    gaps, refused = [text.gap_s for text in said], sum(text.refused for text in said)
    print(f"{len(said)} texts, {refused} times a gateway was away at the start, longest silence {max(gaps):.2f} s")
    print("seconds to end: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in ending.items()))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
async def test_no_text_changes_in_a_storm() -> None:
    print(f"CHAOS_SEED={SEED} CHAOS_S={SECONDS:g}")
    struck, said = Counter[str](), list[Text]()
    async with cluster() as system:
        until = time.monotonic() + SECONDS
        async with asyncio.TaskGroup() as tasks:
            strikes: dict[str, Strike] = {"store": partial(strike_store, system)}
            strikes |= {part.name: partial(strike_part, part) for part in system.parts}
            strikes |= {name: partial(strike_way, system.network.way(*pair)) for name, pair in PAIRS.items()}
            for name, strike in strikes.items():
                tasks.create_task(storm(name, strike, until, struck))
            for _ in range(AT_ONCE):
                tasks.create_task(talk(system, lambda: time.monotonic() > until, said))
        await system.at_rest()
    silences = sorted(text.gap_s for text in said)
    print(f"{len(said)} texts; longest silence: median {silences[len(silences) // 2]:.2f} s, most {silences[-1]:.2f} s")
    print(", ".join(f"{what} {count} times" for what, count in sorted(struck.items())))
    assert struck and said
