"""One fault after the other on a running system of real processes, in the middle of texts: every text is what the
target alone would have said, each client hears it once and whole, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS, PAIRS

TEXTS, TOKENS = 6, 150
SHORT = (
    "a verifier is frozen",
    "a gateway is killed",
    "the store is killed with its data",
    "one of each is killed",
    "gateway and verifier are cut off for 2 s",
    "verifier and drafter are reset for 2 s",
    "gateway and store are cut off for good on the way there",
    "other clients run out of time, cancel, and break their connection",
)
"""What every run of the suite sees; the others are in `make chaos`."""
SPARE_FILES = 10
"""Connections to the store, and to one gateway or another, come and go."""
LEVEL: dict[str, int] = {}
"""Open files of each process, after the first texts."""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
async def test_no_text_changes(system: Cluster, name: str) -> None:
    if not LEVEL:
        await asyncio.gather(*(text.running for text in await system.say(TEXTS, TOKENS)))
        LEVEL.update(system.open_files())
    texts = await system.busy(TEXTS, TOKENS, PAIRS.values())
    try:
        async with asyncio.timeout(240):
            struck = asyncio.create_task(FAULTS[name](system))
            completions = await asyncio.gather(*(text.running for text in texts))
            await struck
        for text, completion in zip(texts, completions, strict=True):
            assert completion.token_ids == text.expected()
        rest_s = await system.at_rest()
    finally:
        system.network.heal()
    await few_files(system)
    moved = sum(completion.finished.statistics.rehomed for completion in completions)
    silence = max(text.gap_s for text in texts)
    print(f"{name}: longest silence {silence:.2f} s, {moved} times on another verifier, at rest after {rest_s:.1f} s")


async def few_files(system: Cluster) -> None:
    """No more connections than there were, once what is left of old ones is closed."""
    async with asyncio.timeout(180):
        while any(count > LEVEL[name] + SPARE_FILES for name, count in system.open_files().items()):
            await asyncio.sleep(0.1)
