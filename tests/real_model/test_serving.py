"""`slipstream serve` on the real model in default settings: drafters, batches and restarts change no text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from slipstream.client.client import complete
from slipstream.rpc.channel import channel
from tests.e2e.test_processes import children
from tests.real_model.fleet import Fleet, differing, generated, request
from tests.real_model.prompts import OWN, asked

DRAFTERS = ("suffix", "ngram", "prediction", "lookahead", "model")
TEMPERATURES = (0.0, 0.8)
FEW, MANY = 16, 128
"""Tokens of each text in the short and in the long form."""
LONG_PROMPTS, MANY_AT_ONCE = 200, 6
EXPECTED = (
    "The capital of France is Paris, which is known for the Eiffel Tower.\n1. The moon\n2. The moon\nfor value in"
)
"""What a client says it expects: partly right for some of the prompts."""


async def plain_texts(server: str, prompts: Sequence[str], tokens: int, temperature: float) -> list[list[int]]:
    texts, load = await generated(server, [request(prompt, tokens, temperature) for prompt in prompts])
    assert not load.total("drafted")
    return texts


async def check_drafting(fleet: Fleet, prompts: Sequence[str], tokens: int, temperature: float, at_once: int) -> None:
    """Texts with the server's own choice of drafters are those of plain decoding. Candidates for few texts at a time
    pay; whether they do for many is the server's to decide."""
    plain = await plain_texts(fleet.grpc, prompts, tokens, temperature)
    drafted = [request(prompt, tokens, temperature, (), EXPECTED) for prompt in prompts]
    texts, _ = await generated(fleet.grpc, drafted, at_once, demanding=at_once < MANY_AT_ONCE)
    different = differing(plain, texts)
    assert not different, f"{len(different)} of {len(plain)} texts differ: {different}"


@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_speculation_on_and_off_give_the_same_texts(fleet: Fleet, temperature: float) -> None:
    await check_drafting(fleet, OWN, FEW, temperature, at_once=5)


@pytest.mark.slow
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("at_once", [1, 6, 16])
@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_in_default_settings_speculation_changes_no_text_of_many_prompts(
    default_fleet: Fleet, temperature: float, at_once: int
) -> None:
    await check_drafting(default_fleet, asked(LONG_PROMPTS), MANY, temperature, at_once)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_each_drafter_alone_gives_the_same_texts(fleet: Fleet, temperature: float, drafter: str) -> None:
    prompts = asked(40)
    plain = await plain_texts(fleet.grpc, prompts, MANY, temperature)
    requests = [request(prompt, MANY, temperature, [drafter], EXPECTED) for prompt in prompts]
    texts, _ = await generated(fleet.grpc, requests)
    assert not differing(plain, texts)


async def test_a_verifier_that_is_killed_and_started_again_goes_on_with_the_same_texts(fleet: Fleet) -> None:
    """In the middle of the texts, and for texts that begin after it."""
    prompts = OWN[:4]
    requests = [request(prompt, 2 * FEW, 0.8, ()) for prompt in prompts]
    plain = await plain_texts(fleet.grpc, prompts, 2 * FEW, 0.8)
    verifier = children(fleet.pid)["verifier_svc"]
    async with channel(fleet.grpc) as line:
        received: list[str] = []
        runs = [asyncio.create_task(complete(line, one, received.append)) for one in requests]
        while len(received) < len(runs):
            await asyncio.sleep(0.005)
        os.kill(verifier, signal.SIGKILL)
        completions = await asyncio.wait_for(asyncio.gather(*runs), 300)
    assert {each.finished.statistics.rehomed for each in completions} == {1}
    assert not differing(plain, [each.token_ids for each in completions])
    assert not differing(plain, await plain_texts(fleet.grpc, prompts, 2 * FEW, 0.8))
