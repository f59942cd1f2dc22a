"""Through the whole running system: speculation changes no token, and no distribution."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from benchmarks.prompts import held_out, request
from slipstream.client.completion import Completion
from slipstream.client.load_generator import run_load
from slipstream.rpc import proto_conversion
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import MOST_TRIES, ROOT, accepting, tokens

PROMPTS = 8
TOKENS = 40


async def texts(
    server: str, *, speculate: bool, temperature: float, seed: int, k: int | None = None
) -> list[list[int]]:
    """Texts of the server. With speculation requests repeat until something was drafted: on a machine that is busy
    for a moment a candidate of so small a target may not pay."""
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


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    """The target as the library computes it."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(ROOT / "models/target", dtype=torch.float32).eval()
    return model


def ranks(completion: Completion, model: torch.nn.Module, top_k: int, chance: np.random.Generator) -> list[float]:
    """Where each token fell in the target's own distribution, given everything before it: uniform on [0, 1) iff it was
    drawn from that distribution (randomised probability integral transform, Smith 1985). The library's own pass."""
    prompt, output = list(completion.started.prompt_token_ids), completion.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    kept = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    p = kept.double().softmax(-1).numpy()
    below = p.cumsum(-1) - p
    return [below[i, token] + chance.random() * p[i, token] for i, token in enumerate(output)]


@pytest.mark.parametrize(
    ("rule", "least"), [("coupled", 1e-3), ("rejection", 1e-6), ("block", 1e-6), ("recursive", 1e-6)]
)
async def test_sampled_tokens_are_distributed_as_the_target_says(
    server: str, reference: torch.nn.Module, rule: str, least: float
) -> None:
    """Chi-square through the whole system. The coupled rule's outcome is a function of the seeds, so its bound can be
    tight; the ratio rules' depends on which candidates came in time, so its p-value is a fresh draw in every run."""
    top_k, bins = 20, 20
    requests = [
        gateway_pb2.GenerateRequest(
            prompt=prompt,
            max_tokens=TOKENS,
            ignore_eos=True,
            sampling=gateway_pb2.SamplingOptions(
                temperature=1.0, top_k=top_k, seed=seed, acceptance=proto_conversion.rule_number(rule)
            ),
        )
        for seed, prompt in enumerate(held_out(60 if rule == "coupled" else 40, characters=120, seed=4))
    ]
    for _ in range(MOST_TRIES):  # on a busy machine hardly any candidate may come in time
        load = await run_load(server, requests, 4)
        if load.total("accepted") > 20:
            break
    assert load.total("accepted") > 20
    chance = np.random.default_rng(1)
    where = [rank for completion in load.completions for rank in ranks(completion, reference, top_k, chance)]
    observed = np.bincount((np.array(where) * bins).astype(int), minlength=bins)
    p_value = chisquare(observed).pvalue
    print(f"{rule}: {len(where)} tokens, {load.total('accepted'):.0f} accepted, chi-square p = {p_value:.4f}")
    assert p_value > least


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
