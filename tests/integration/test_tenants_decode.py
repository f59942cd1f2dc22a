"""While one tenant decodes, another tenant's TPOT and longest gap at most double, whatever the first one sends; on a
virtual clock, with a drafter, where a step takes longer with each token, as on CPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

import pytest

from benchmarks.virtual import World, system
from capacity.clock import run
from slipstream.engine.emulated.model import LinearCost
from tests.support.tenant_texts import Tenant, Text

WORLD = World(target=LinearCost(0.003, 0.0005), draft=LinearCost(0.0003, 0.00002))
TOKENS, CANDIDATES = 600, 8
NONE = "no attack"
Attack = Callable[[Tenant], None]


@cache
def seen(name: str) -> tuple[Text, float, int]:
    """The victim's long text beside the attack of that name, the attacker's tokens a second meanwhile, and its texts'
    number. Virtual time makes each run the same as the one before."""

    async def main() -> tuple[Text, float, int]:
        async with system(WORLD) as running:
            hostile, victim = Tenant(running, "h"), Tenant(running, "v")
            if name != NONE:
                ATTACKS[name](hostile)
                await asyncio.sleep(0.5)  # its prompts are read, those of the long ones not all
            began, before = asyncio.get_running_loop().time(), tokens(hostile)
            text = victim.ask(8, TOKENS, CANDIDATES)
            await text.done.wait()
            rate = (tokens(hostile) - before) / (asyncio.get_running_loop().time() - began)
            await hostile.leave()
            await victim.leave()
            return text, rate, sum(not each.done.is_set() for each in hostile.texts)

    found: tuple[Text, float, int] = run(main())
    return found


def tokens(tenant: Tenant) -> int:
    return sum(len(text.output) for text in tenant.texts)


def alone() -> Text:
    return seen(NONE)[0]


@cache
def attacker_alone(sessions: int) -> float:
    """Its tokens a second without a neighbour."""

    async def main() -> float:
        async with system(WORLD) as running:
            tenant = Tenant(running, "h")
            texts(sessions)(tenant)
            await asyncio.sleep(0.5)
            before = tokens(tenant)
            await asyncio.sleep(2.0)
            rate = (tokens(tenant) - before) / 2.0
            await tenant.leave()
            return rate

    found: float = run(main())
    return found


def texts(sessions: int, candidates: int = CANDIDATES) -> Attack:
    def attack(tenant: Tenant) -> None:
        for _ in range(sessions):
            tenant.ask(8, 20_000, candidates)

    return attack


def prompts(tenant: Tenant) -> None:
    for _ in range(8):
        tenant.ask(20_000, 2, CANDIDATES)


def mixed(tenant: Tenant) -> None:
    texts(4)(tenant)
    prompts(tenant)


ATTACKS = {f"{each} texts": texts(each) for each in (1, 4, 16, 64)}
ATTACKS |= {f"{each} texts without candidates": texts(each, 0) for each in (4, 64)}
ATTACKS |= {"prompts": prompts, "mixed": mixed}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith(("4 ", "16 ")) else ()) for name in ATTACKS]
)
def test_another_tenant_s_tpot_and_gaps_at_most_double(name: str) -> None:
    text, _, running = seen(name)
    assert running, "the attack has ended before"
    assert text.output == alone().output
    print(f"{name}: TPOT {1e3 * text.tpot:.2f} ms instead of {1e3 * alone().tpot:.2f}")
    assert text.tpot <= 2.0 * alone().tpot
    assert text.longest_gap <= 2.0 * alone().longest_gap


@pytest.mark.parametrize("sessions", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (4, 16)), 64])
def test_the_tenant_with_the_larger_load_keeps_half_of_its_token_rate(sessions: int) -> None:
    rate = seen(f"{sessions} texts")[1]
    print(f"{sessions}: {attacker_alone(sessions):.0f} -> {rate:.0f} tokens a second")
    assert rate >= 0.45 * attacker_alone(sessions)
