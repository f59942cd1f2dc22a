"""One fault after the other on a running system of real processes, in the middle of texts: every text is what the
target alone would have said, each client hears it once and whole, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.chaos.cluster import Cluster, Part, cluster

TEXTS, TOKENS = 6, 150
Fault = Callable[[Cluster], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[Cluster]:
    async with cluster() as running:
        yield running


async def killed(*parts: Part) -> None:
    """And started again at the same address, when the others have gone on for a while."""
    for part in parts:
        await part.kill()
    await asyncio.sleep(0.5)
    await asyncio.gather(*(part.start() for part in parts))


async def frozen(part: Part, seconds: float = 3.0) -> None:
    """Alive, silent, and back when others have taken its work: what it says then must not count."""
    await part.freeze()
    await asyncio.sleep(seconds)
    await part.thaw()


async def redis_killed(system: Cluster) -> None:
    """With all that was in it."""
    system.redis.kill()
    await asyncio.sleep(0.5)
    system.redis.start()


async def redis_frozen(system: Cluster) -> None:
    system.redis.freeze()
    await asyncio.sleep(1.0)
    system.redis.thaw()


FAULTS: dict[str, Fault] = {
    "a drafter is killed": lambda system: killed(system.drafters[0]),
    "all drafters are killed": lambda system: killed(*system.drafters),
    "a drafter is frozen": lambda system: frozen(system.drafters[0]),
    "a verifier is killed": lambda system: killed(system.verifiers[0]),
    "all verifiers are killed": lambda system: killed(*system.verifiers),
    "a verifier is frozen": lambda system: frozen(system.verifiers[0]),
    "a gateway is killed": lambda system: killed(system.gateways[0]),
    "all gateways are killed": lambda system: killed(*system.gateways),
    "a gateway is frozen": lambda system: frozen(system.gateways[0], 6.0),
    "the store is killed with its data": redis_killed,
    "the store is frozen": redis_frozen,
    "one of each is killed": lambda system: killed(system.gateways[1], system.verifiers[1], system.drafters[1]),
}


SHORT = ("a verifier is frozen", "a gateway is killed", "the store is killed with its data", "one of each is killed")
"""What every run of the suite sees; the others are in `make chaos`."""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
async def test_no_text_changes(system: Cluster, name: str) -> None:
    texts = await system.say(TEXTS, TOKENS)
    fault = asyncio.create_task(FAULTS[name](system))
    async with asyncio.timeout(60):
        completions = await asyncio.gather(*(text.running for text in texts))
        await fault
    for text, completion in zip(texts, completions, strict=True):
        assert completion.token_ids == text.expected()
    await system.at_rest()
    print(f"{name}: longest silence {max(text.gap_s for text in texts):.2f} s", system.open_files())
