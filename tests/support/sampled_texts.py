"""Are texts of a running system drawn from its target? A test that a wrong acceptance rule cannot pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.load_generator import run_load
from benchmarks.prompts import held_out
from slipstream.client.completion import Completion
from slipstream.rpc import proto_conversion
from slipstream.v1 import gateway_pb2
from tests.support.draft_bias import MOST_DEVIATIONS, FloatArray, Leaning, ranks, uniformity

MODELS = Path(__file__).resolve().parents[2] / "models"
TOKENS = 40
TOP_K = 20
PLACES = 500
"""Rounds with candidates that a rule is judged by. A rule that accepted whatever was drafted at 30 % of places would
be some 7 standard deviations off."""


async def assert_distributed(server: str, rule: str, tries: int, places: int = PLACES) -> None:
    """Through the whole system, until enough candidates were judged: no deviation towards the drafter, and by
    chi-square none at all. The schedule and the seeds are fixed; under `rejection` the text also depends on which
    candidates came in time, so that the bounds are those of fresh draws."""
    models = [
        AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval() for name in ("target", "draft")
    ]
    chance, leaning, where = np.random.default_rng(1), Leaning(), list[FloatArray]()
    rounds = accepted = 0.0
    for repeat in range(tries):
        prompts = enumerate(held_out(36, characters=120, seed=4 + repeat), start=1000 * repeat)
        load = await run_load(server, [_sampled(prompt, seed, rule) for seed, prompt in prompts], 4)
        for completion in load.completions:
            p, q = (_distributions(completion, model) for model in models)
            leaning.add(p, q, completion.token_ids)
            where.append(ranks(p, completion.token_ids, chance))
        rounds, accepted = rounds + load.total("rounds_with_drafts"), accepted + load.total("accepted")
        if rounds >= places:
            break
    assert rounds >= places and accepted > 0
    p_value = uniformity(np.concatenate(where))
    print(f"{rule}: {sum(map(len, where))} tokens, {rounds:.0f} rounds with candidates, {accepted:.0f} accepted")
    print(f"leaning {leaning.deviations:.2f} standard deviations, chi-square p = {p_value:.4g}")
    assert abs(leaning.deviations) < MOST_DEVIATIONS
    assert p_value > 1e-6


def _distributions(completion: Completion, model: torch.nn.Module) -> FloatArray:
    """The model's own [tokens, vocabulary] at each place of the text, given everything before it."""
    prompt, output = list(completion.started.prompt_token_ids), completion.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    kept = logits.masked_fill(logits < logits.topk(TOP_K).values[:, -1:], -torch.inf)
    return kept.double().softmax(-1).numpy()


def _sampled(prompt: str, seed: int, rule: str) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=prompt,
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=gateway_pb2.SamplingOptions(
            temperature=1.0, top_k=TOP_K, seed=seed, acceptance=proto_conversion.rule_number(rule)
        ),
    )
