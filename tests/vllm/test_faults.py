"""Faults of a running system with a verifier on vLLM: every text is what it would have been, and nobody waits for a
step's timeout. One step in a hundred fails in the worker's sampler anyway."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import pytest_asyncio
import typer
from typer.testing import CliRunner

from benchmarks.load_generator import LoadResult, run_load
from capacity.__main__ import plan
from capacity.cost import Table
from slipstream.rpc.channel import CHANNEL_OPTIONS
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2
from tests.support.fleet import Gateway, gateway, until
from tests.support.sampled_texts import assert_distributed
from tests.vllm.system import (
    LIMIT_S,
    READY_S,
    STEP_TIMEOUT_S,
    TOKENS,
    UNAVAILABLE,
    Others,
    System,
    code_of_end,
    generate,
    gone,
    requests,
    running_system,
    texts_of,
    workers,
)
from verifier_svc.estimators.cost_curve import FREE_TOKENS, PRIOR_S

STORM_S = 8.0
NOTICED_S = dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] / 1e3
"""Before a connection is even asked whether it is alive, which is the shortest of all timeouts that would end a session
of a verifier that says nothing. What is noticed takes milliseconds."""
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.mended_faults]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def system(others: Others) -> AsyncIterator[System]:
    async with running_system(others) as running:
        yield running


async def test_sampled_tokens_follow_the_target_distribution(system: System) -> None:
    await assert_distributed(system.on_vllm, "coupled", tries=10, places=500)


async def test_texts_with_remote_drafters_are_the_embedded_engine_s_plain_ones(system: System) -> None:
    load = await run_load(system.on_vllm, requests(TOKENS), 4)
    assert texts_of(load) == system.plain(TOKENS)
    assert load.total("accepted") > 0


async def test_a_least_length_holds_and_gives_the_embedded_engine_s_text(system: System) -> None:
    """Stop tokens are those that come soon: without the least length the texts would end at once."""
    stops = [text[3] for text in system.plain(4)]

    def limited(least: int, *, speculate: bool) -> list[gateway_pb2.GenerateRequest]:
        wanted = requests(80, speculate=speculate)
        for each, stop in zip(wanted, stops, strict=True):
            each.stop_token_ids.append(stop)
            each.min_tokens = least
        return wanted

    plain = await generate(system.others.gateway, limited(40, speculate=False))
    assert await generate(system.on_vllm, limited(40, speculate=True)) == plain
    assert all(len(text) >= 40 for text in plain)
    free = await generate(system.on_vllm, limited(0, speculate=True))
    assert all(len(text) <= 4 for text in free)


async def test_bad_words_and_a_limit_of_reasoning_give_the_embedded_engine_s_text(system: System) -> None:
    """Each is what the text would have without it: every fourth pair of tokens, and reasoning from the third on."""
    free = system.plain(TOKENS)
    bad = {pair for text in free for pair in [*pairwise(text)][8::4]}
    bad -= {pair for text in free for pair in pairwise(text[:9])}  # so that each text comes to its mark
    end = max(map(max, free)) + 1

    def limited(*, speculate: bool) -> list[gateway_pb2.GenerateRequest]:
        wanted = requests(TOKENS, speculate=speculate)
        for each, text in zip(wanted, free, strict=True):
            each.sampling.bad_words_ids.extend(gateway_pb2.TokenIds(token_ids=pair) for pair in sorted(bad))
            limit = gateway_pb2.ReasoningLimit(max_tokens=4, begin_token_id=text[2], end_token_id=end)
            each.reasoning_limit.CopyFrom(limit)
        return wanted

    plain = await generate(system.others.gateway, limited(speculate=False))
    assert await generate(system.on_vllm, limited(speculate=True)) == plain
    assert not any(bad & {*pairwise(text)} for text in plain)
    assert all(end in text[:8] for text in plain)


async def test_the_costs_that_it_measured_can_be_planned_with(system: System) -> None:
    """`slipstream plan --measured-at`: what its start or its steps since measured, and not what is believed before."""
    await generate(system.on_vllm, requests(8))
    app = typer.Typer()
    app.command()(plan)
    told = await asyncio.to_thread(CliRunner().invoke, app, ["--measured-at", system.vllm_address])
    assert told.exit_code == 0, told.output
    table = Table(**json.loads(told.stdout))
    assert all(row == sorted(row) for row in table.seconds)
    assert table(512, 1) > table(1, 1) > 0.0
    assert table(4, 4) != pytest.approx(PRIOR_S * (1 + 4 / FREE_TOKENS))


async def kill_worker(system: System) -> None:
    for process in workers(system.vllm.process.pid):
        process.kill()


async def kill_verifier(system: System) -> None:
    """With vLLM's core, which lives in its process. Its workers are stopped: only the kernel can end them with it."""
    for process in workers(system.vllm.process.pid):
        process.suspend()
    system.vllm.process.kill()


async def break_sampler(system: System) -> None:
    system.toggle_fault()


@pytest.mark.parametrize(
    "cause",
    [break_sampler, kill_verifier],
    ids=["the sampler raises in every step", "the core is killed"],
)
async def test_sessions_become_unavailable_without_a_timeout_and_go_on_elsewhere(
    system: System, cause: Callable[[System], Awaitable[None]]
) -> None:
    """And the verifier serves again: started anew, or in the same process where that lives."""
    processes = workers(system.vllm.process.pid)
    async with session_in_mid_text(system) as speaking:
        generating = await system.in_mid_text(TOKENS)
        await cause(system)
        await assert_unavailable(*speaking)
    async with asyncio.timeout(READY_S + LIMIT_S):
        if cause is break_sampler:
            assert await generating == system.plain(TOKENS)
            system.toggle_fault()
        else:
            assert await system.vllm.ended() == -signal.SIGKILL
            await until(lambda: gone(processes))
            await system.start_vllm()
            assert await generating == system.plain(TOKENS)
    assert await (await system.in_mid_text(TOKENS)) == system.plain(TOKENS)


@asynccontextmanager
async def session_in_mid_text(system: System) -> AsyncIterator[tuple[Gateway, int]]:
    """One that the verifier on vLLM alone has, with its number."""
    async with gateway(system.vllm_address) as speaking:
        number, session = await speaking.open([1, 2, 3], tokens=900)
        await until(lambda: len(session.token_ids) > 10)
        yield speaking, number


async def assert_unavailable(speaking: Gateway, number: int) -> None:
    began = time.monotonic()
    assert await code_of_end(speaking, number) == UNAVAILABLE
    took_s = time.monotonic() - began
    assert took_s < NOTICED_S < STEP_TIMEOUT_S
    print(f"UNAVAILABLE after {took_s:.3f} s")


async def strike(seed: int, address: str, role: Role, over: asyncio.Event) -> None:
    """Kills or freezes a drafter, again and again."""
    chance = random.Random(seed)
    while not over.is_set():
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        if chance.random() < 0.5:
            role.process.kill()
            assert await role.ended() == -signal.SIGKILL
            await role.start({"DRAFTER_LISTEN": address})
        else:
            os.kill(role.process.pid, signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0.2, 2.0))
            os.kill(role.process.pid, signal.SIGCONT)


async def test_a_storm_of_dying_drafters_and_then_a_lost_worker_changes_no_text(system: System) -> None:
    """Which drafter is struck and when is a function of the seed; what it hits is not, for the processes are real. What
    the lost worker had becomes unavailable at once."""
    over, loads, processes = asyncio.Event(), list[LoadResult](), workers(system.vllm.process.pid)

    async def talk() -> None:
        while not over.is_set():
            loads.append(load := await run_load(system.both, requests(120), 4))
            assert texts_of(load) == system.plain(120)

    async with asyncio.timeout(4 * LIMIT_S), asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(talk())
        for seed, (address, role) in enumerate(system.others.drafters.items()):
            tasks.create_task(strike(seed, address, role, over))
        await asyncio.sleep(STORM_S)
        async with session_in_mid_text(system) as speaking:
            await kill_worker(system)
            await assert_unavailable(*speaking)
        assert await system.vllm.ended() == 1
        await until(lambda: gone(processes))
        told = len(loads)
        await until(lambda: len(loads) > told + 2)
        over.set()
    assert sum(load.total("accepted") for load in loads) > 0
    print(f"{4 * len(loads)} texts, {sum(load.total('rehomed') for load in loads):.0f} times on another verifier")
