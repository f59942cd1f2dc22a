"""Through the whole running system: speculation changes no token, and no distribution."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from benchmarks.load_generator import run_load
from benchmarks.prompts import held_out, request
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import MOST_TRIES, accepting, tokens
from tests.support.sampled_texts import assert_distributed

PROMPTS = 4
TOKENS = 40
ALLOWED = range(3, 400)


async def texts(
    server: str, *, speculate: bool, temperature: float, seed: int, k: int | None = None
) -> list[list[int]]:
    """Texts of the server. With speculation requests repeat until something was drafted: on a machine that is busy
    for a moment candidates may all come too late."""
    prompts = held_out(PROMPTS)
    requests = [
        request(prompt, TOKENS, speculate=speculate, temperature=temperature, seed=seed, k=k) for prompt in prompts
    ]
    received: list[list[int]] = []
    for _ in range(MOST_TRIES):
        load = await run_load(server, requests, 4)
        repeated, received = received, tokens(load)
        assert repeated in ([], received)
        drafted = load.total("drafted")
        assert speculate or not drafted
        if drafted or not speculate:
            return received
    raise AssertionError(f"nothing was drafted in {MOST_TRIES} tries")


@pytest.mark.parametrize(
    ("temperature", "seed"), [(0.0, 0), pytest.param(0.7, 1, marks=pytest.mark.slow), (1.0, 2**63 + 5)]
)
async def test_speculation_on_and_off_give_the_same_tokens(server: str, temperature: float, seed: int) -> None:
    plain = await texts(server, speculate=False, temperature=temperature, seed=seed)
    for k in (1, 4, 8):
        assert await texts(server, speculate=True, temperature=temperature, seed=seed, k=k) == plain


async def test_seeds_decide_the_text(server: str) -> None:
    one = await texts(server, speculate=True, temperature=1.0, seed=1)
    assert await texts(server, speculate=True, temperature=1.0, seed=1) == one
    assert await texts(server, speculate=True, temperature=1.0, seed=2) != one


@pytest.mark.parametrize(
    "rule", [pytest.param("coupled", marks=pytest.mark.slow), pytest.param("rejection", marks=pytest.mark.long)]
)
async def test_sampled_tokens_follow_the_target_distribution(server: str, rule: str) -> None:
    """The short suite shows of `coupled` that its texts are those of plain decoding, and of `rejection` the same of a
    gateway, a verifier and a drafter in one process: tests/integration/test_ratio_rules.py."""
    await assert_distributed(server, rule, MOST_TRIES)


async def test_every_processor_is_exact_under_speculation(server: str) -> None:
    """Penalties, bias, allowed tokens, cuts: the same tokens with candidates as without, its path's history too."""
    options = [
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, repetition_penalty=1.3),
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, presence_penalty=1.0, frequency_penalty=0.7),
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, top_p=0.8),
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, min_p=0.1, top_k=20),
        gateway_pb2.SamplingOptions(temperature=0.0, repetition_penalty=1.2, logit_bias={5: 3.0, 199: -5.0}),
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, repetition_penalty=1.1, allowed_token_ids=ALLOWED),
    ]
    requests = [
        gateway_pb2.GenerateRequest(
            prompt=prompt,
            max_tokens=TOKENS,
            ignore_eos=True,
            sampling=option,
            speculation=gateway_pb2.SpeculationOptions(disabled=True),
        )
        for prompt, option in product(held_out(2, seed=3), options)
    ]
    expected = tokens(await run_load(server, requests, 4))
    assert all(set(text) <= set(ALLOWED) for text in expected[len(options) - 1 :: len(options)])
    for each in requests:
        each.speculation.disabled = False
    await accepting(server, requests, expected)


async def test_bad_words_are_exact_under_speculation(server: str) -> None:
    """Every fourth pair of the free texts is a bad word."""
    requests = [
        gateway_pb2.GenerateRequest(
            prompt=prompt,
            max_tokens=TOKENS,
            ignore_eos=True,
            sampling=gateway_pb2.SamplingOptions(temperature=temperature, seed=7),
            speculation=gateway_pb2.SpeculationOptions(disabled=True),
        )
        for prompt, temperature in product(held_out(2, seed=3), (0.0, 0.9))
    ]
    free = tokens(await run_load(server, requests, 4))
    bad = {pair for text in free for pair in [*pairwise(text)][::4]}
    for each in requests:
        each.sampling.bad_words_ids.extend(gateway_pb2.TokenIds(token_ids=pair) for pair in sorted(bad))
    expected = tokens(await run_load(server, requests, 4))
    assert not any(bad & {*pairwise(text)} for text in expected)
    for each in requests:
        each.speculation.disabled = False
    await accepting(server, requests, expected)
