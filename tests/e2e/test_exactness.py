"""Through the whole running system: speculation changes no token, and no distribution."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.prompts import held_out, request
from slipstream.client.completion import Completion
from slipstream.client.load_generator import run_load
from slipstream.rpc import proto_conversion
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import MOST_TRIES, ROOT, accepting, tokens
from tests.leaning import MOST_DEVIATIONS, FloatArray, Leaning, ranks, uniformity

PROMPTS = 8
TOKENS = 40


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


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.7, 1), (1.0, 2**63 + 5)])
async def test_speculation_on_and_off_give_the_same_tokens(server: str, temperature: float, seed: int) -> None:
    plain = await texts(server, speculate=False, temperature=temperature, seed=seed)
    for k in (1, 4, 8):
        assert await texts(server, speculate=True, temperature=temperature, seed=seed, k=k) == plain


async def test_seeds_decide_the_text(server: str) -> None:
    one = await texts(server, speculate=True, temperature=1.0, seed=1)
    assert await texts(server, speculate=True, temperature=1.0, seed=1) == one
    assert await texts(server, speculate=True, temperature=1.0, seed=2) != one


Model = torch.nn.Module
TOP_K = 20
PLACES = 1000
"""Rounds with candidates that a rule is judged by. A rule that accepted whatever was drafted at 30 % of places would
be some 10 standard deviations off."""


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    """The target and the draft model as the library computes them."""
    folders = (ROOT / "models/target", ROOT / "models/draft")
    target, draft = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in folders)
    return target, draft


def distributions(completion: Completion, model: Model) -> FloatArray:
    """The model's own [tokens, vocabulary] at each place of the text, given everything before it."""
    prompt, output = list(completion.started.prompt_token_ids), completion.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    kept = logits.masked_fill(logits < logits.topk(TOP_K).values[:, -1:], -torch.inf)
    return kept.double().softmax(-1).numpy()


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_sampled_tokens_are_distributed_as_the_target_says(
    server: str, models: tuple[Model, Model], rule: str
) -> None:
    """Through the whole system, until enough candidates were judged: no deviation towards the drafter, and by
    chi-square none at all. The schedule and the seeds are fixed; under `rejection` the text also depends on which
    candidates came in time, so that the bounds are those of fresh draws."""
    chance, leaning, where = np.random.default_rng(1), Leaning(), list[FloatArray]()
    rounds = accepted = 0.0
    for repeat in range(MOST_TRIES):
        prompts = enumerate(held_out(30, characters=120, seed=4 + repeat), start=1000 * repeat)
        load = await run_load(server, [sampled(prompt, seed, rule) for seed, prompt in prompts], 4)
        for completion in load.completions:
            p, q = (distributions(completion, model) for model in models)
            leaning.add(p, q, completion.token_ids)
            where.append(ranks(p, completion.token_ids, chance))
        rounds, accepted = rounds + load.total("rounds_with_drafts"), accepted + load.total("accepted")
        if rounds >= PLACES:
            break
    assert rounds >= PLACES and accepted > 0
    p_value = uniformity(np.concatenate(where))
    print(f"{rule}: {sum(map(len, where))} tokens, {rounds:.0f} rounds with candidates, {accepted:.0f} accepted")
    print(f"leaning {leaning.deviations:.2f} standard deviations, chi-square p = {p_value:.4g}")
    assert abs(leaning.deviations) < MOST_DEVIATIONS
    assert p_value > 1e-6


def sampled(prompt: str, seed: int, rule: str) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=prompt,
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=gateway_pb2.SamplingOptions(
            temperature=1.0, top_k=TOP_K, seed=seed, acceptance=proto_conversion.rule_number(rule)
        ),
    )


async def test_every_processor_is_exact_under_speculation(server: str) -> None:
    """Penalties, bias, top-p, min-p: the same tokens with candidates as without, history of the path included."""
    options = [
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, repetition_penalty=1.3),
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, presence_penalty=1.0, frequency_penalty=0.7),
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, top_p=0.8),
        gateway_pb2.SamplingOptions(temperature=0.9, seed=7, min_p=0.1, top_k=20),
        gateway_pb2.SamplingOptions(temperature=0.0, repetition_penalty=1.2, logit_bias={5: 3.0, 199: -5.0}),
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
    for each in requests:
        each.speculation.disabled = False
    await accepting(server, requests, expected)
