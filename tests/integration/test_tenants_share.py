"""What one tenant's requests do to another's, on a virtual clock: TTFT, TPOT and longest gap at most double."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.virtual import VOCABULARY, System, World, decode_request, system
from capacity.clock import run
from slipstream.engine.emulated.model import LinearCost
from slipstream.engine.engine import ModelOutput
from slipstream.engine.segment import Segment
from slipstream.tenants import tenant_id, tenant_salt
from tests.support.fleet import emulated_text
from tests.support.tenant_texts import Tenant, Text

STEP_S = 0.005
WORLD = World(target=LinearCost(STEP_S, 0.0002, 0.0, 64))
"""256 tokens of a prompt would make a step nine times as long."""
SESSIONS = LinearCost(0.0022, 0.00012, 0.0006)
STREAM, SHORT = 400, 8
"""Tokens of the victim's long text, and of the short ones that it asks for one after another meanwhile."""


@dataclass(frozen=True)
class Seen:
    """What the victim saw, in seconds."""

    first: float
    """Of its first text: the system did not know of it before."""
    ttft: float
    """The longest of the others."""
    tpot: float
    gap: float


Attack = Callable[[Tenant], list[Text]]


def seen(world: World, attack: Attack, per_pair_s: float = 0.0) -> Seen:
    """By a victim that reads one long text and asks for short ones all the time. Every text must be right."""

    async def main() -> Seen:
        async with system(world) as running:
            _with_contexts(running, per_pair_s)
            hostile, victim = Tenant(running, "h"), Tenant(running, "v")
            attacks = attack(hostile)
            await asyncio.sleep(3 * STEP_S)
            stream = victim.ask(8, STREAM)
            shorts: list[Text] = []
            while not stream.done.is_set():
                shorts.append(victim.ask(8, SHORT))
                await shorts[-1].done.wait()
                await asyncio.sleep(1.3 * STEP_S)
            for text in attacks:
                await text.done.wait()
            for text in (*attacks, *shorts, stream):
                start = len(text.prompt) - 1
                whole = emulated_text(text.prompt[:1], start + len(text.output), VOCABULARY)
                assert text.output == whole[start:]
            await hostile.leave()
            await victim.leave()
            return Seen(stream.ttft, max(text.ttft for text in shorts[1:]), stream.tpot, stream.longest_gap)

    found: Seen = run(main())
    return found


def _with_contexts(running: System, per_pair_s: float) -> None:
    """A prompt's token takes so many seconds more for each token of its context, which no cost curve has measured."""
    engine, forward = running.engine, running.engine.forward

    def slower(segments: list[Segment]) -> ModelOutput:
        output = forward(segments)
        engine._sleep(per_pair_s * sum(len(each.pending) * each.sequence.length for each in segments))
        return output

    engine.forward = slower  # type: ignore[method-assign, assignment]


def nothing(tenant: Tenant) -> list[Text]:
    return []


def long_prompts(tenant: Tenant) -> list[Text]:
    return [tenant.ask(3000, 2) for _ in range(16)]


def many_sessions(tenant: Tenant) -> list[Text]:
    return [tenant.ask(40, 600) for _ in range(40)]


def one_that_does_not_fit(tenant: Tenant) -> list[Text]:
    """Three that hold half of the KV for long, and one that has to wait for all of them."""
    return [*(tenant.ask(500, 400) for _ in range(3)), tenant.ask(2900, 2)]


@pytest.fixture(scope="module")
def alone() -> Seen:
    return seen(WORLD, nothing)


def first_tokens(prompt: int, sessions: int, texts: int = 6) -> list[float]:
    """TTFT of a victim's texts, one after another, beside so many sessions that decode. A session costs as much as five
    of its tokens, as on CPUs."""

    async def main() -> list[float]:
        async with system(World(target=SESSIONS)) as running:
            hostile, victim = Tenant(running, "h"), Tenant(running, "v")
            for _ in range(sessions):
                hostile.ask(8, 20_000)
            while not all(text.output for text in hostile.texts):
                await asyncio.sleep(STEP_S)
            for number in range(texts):
                await victim.ask(prompt, 2).done.wait()
                await asyncio.sleep(0.3 * number * STEP_S)
            await hostile.leave()
            await victim.leave()
            return [text.ttft for text in victim.texts]

    found: list[float] = run(main())
    return found


@pytest.mark.parametrize("prompt", [8, 100])
@pytest.mark.parametrize("sessions", [4, 16, 64])
def test_another_tenant_s_first_token_waits_for_one_step_and_twice_its_own_prompt(prompt: int, sessions: int) -> None:
    """Beside 16 sessions that decode, prompts once got a token a step: 124 ms instead of 4, and 32 times 4 ms beside
    64."""
    running = SESSIONS(sessions, sessions)
    assert max(first_tokens(prompt, sessions)) <= running + 2.0 * max(first_tokens(prompt, 0)) + STEP_S


@pytest.mark.parametrize(
    ("attack", "blocks"),
    [(long_prompts, 1 << 15), (one_that_does_not_fit, 100), (many_sessions, 100)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_another_tenant_s_times_at_most_double(alone: Seen, attack: Attack, blocks: int) -> None:
    found = seen(World(target=WORLD.target, blocks=blocks), attack)
    assert found.tpot <= 2.0 * alone.tpot and found.gap <= 2.0 * alone.gap
    assert found.ttft <= 2.0 * alone.ttft and found.first <= 2.0 * alone.first + STEP_S


def test_a_salt_names_no_tenant() -> None:
    """A client of an open gateway once wrote another tenant's name into it."""

    async def main() -> tuple[str, str]:
        async with system(WORLD) as running:
            gateway = running.gateway()
            for number, tenant in enumerate(("", tenant_id("victim"))):
                request = decode_request(number, [1, 2], 9, 0, [], tenant_salt("victim", ""))
                request.commands[0].open.tenant = tenant
                gateway.receive(request)
            return running.service.by_id["session-0"].request.tenant, running.service.by_id["session-1"].request.tenant

    assert run(main()) == ("", tenant_id("victim"))


def test_beside_a_prompt_of_32k_tokens_no_gap_is_longer_than_two_steps(alone: Seen) -> None:
    """Its last tokens take four times as long as the first ones: 0.0002 s, and 2e-8 s for each token of context."""
    found = seen(WORLD, lambda tenant: [tenant.ask(32_768, 2)], 2e-8)
    assert found.gap <= 2.0 * alone.gap and found.ttft <= 2.0 * alone.ttft
