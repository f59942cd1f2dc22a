"""The ratio rules between real services with tiny random models: tokens are drawn from the target's distribution."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running as drafter_running
from slipstream.engine.factory import open_engine
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import verifier_pb2
from tests.support.checkpoints import save_checkpoint
from tests.support.draft_bias import MOST_DEVIATIONS, FloatArray, Leaning, ranks, uniformity
from tests.support.fleet import drafter, gateway, until, verifier

VOCABULARY, TOKENS = 4, 30
AT_ONCE, MOST_SESSIONS = 20, 600
DRAFTED = 3000
"""Candidates that the rule is judged by. One that accepted whatever was drafted at 30 % of places would be some 15
standard deviations off."""
PROMPT = [1, 3, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft, which differ."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.3}
    place = tmp_path_factory.mktemp("pair")
    target, draft = (save_checkpoint("llama", place / str(seed), seed=seed, **shape) for seed in (0, 1))
    return target, draft


def distributions(folder: Path, texts: list[list[int]]) -> FloatArray:
    """The model's own [tokens, vocabulary] at each place of the texts, by the library's own pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits
    return logits[:, len(PROMPT) - 1 : -1].double().softmax(-1).flatten(0, 1).numpy()


async def test_tokens_follow_the_target_distribution(folders: tuple[Path, Path]) -> None:
    """What was ready when decides which candidates are judged, so the bounds are those of a fresh draw in every run:
    no leaning towards the drafter, and by chi-square no deviation at all."""
    target, draft = folders
    texts: list[list[int]] = []
    drafted = accepted = 0
    async with (
        drafter(open_engine(str(draft), "float32")) as guesses,
        verifier(open_engine(str(target), "float32"), always_speculate=True, max_wait_s=1.0) as server,
        gateway(server.address) as client,
    ):
        for start in range(0, MOST_SESSIONS, AT_ONCE):
            runs = [
                client.decode(
                    PROMPT,
                    tokens=TOKENS,
                    sampling=SamplingParams(seed=seed, acceptance="rejection"),
                    drafters=[guesses],
                    trusted=True,
                )
                for seed in range(start, start + AT_ONCE)
            ]
            for decoded in await asyncio.gather(*runs):
                assert not any(event.failure.code for event in decoded.events)
                texts.append(decoded.token_ids)
                drafted, accepted = drafted + decoded.drafted, accepted + decoded.accepted
            if drafted > DRAFTED:
                break
    p, q = distributions(target, texts), distributions(draft, texts)
    tokens = [token for text in texts for token in text]
    leaning = Leaning()
    leaning.add(p, q, tokens)
    p_value = uniformity(ranks(p, tokens, np.random.default_rng(1)))
    print(f"{len(tokens)} tokens, {drafted} drafted, {accepted} accepted")
    print(f"leaning {leaning.deviations:.2f} standard deviations, chi-square p = {p_value:.4g}")
    assert drafted > DRAFTED
    assert abs(leaning.deviations) < MOST_DEVIATIONS
    assert p_value > 1e-6


async def test_a_drafter_without_distributions_refuses_a_ratio_rule_and_the_session_goes_on() -> None:
    async with (
        drafter_running(DrafterConfig(method="ngram", listen="127.0.0.1:0", grace_s=0.0)) as guesses,
        verifier(open_engine("emulated:")) as server,
        gateway(server.address) as client,
    ):
        number, decoded = await client.open(
            [1, 2] * 8,
            tokens=100,
            sampling=SamplingParams(seed=1, acceptance="rejection"),
            drafters=[guesses.address],
            trusted=True,
            credit=1,
        )
        await until(lambda: bool(decoded.events))
        await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=1000))
        await until(decoded.done.is_set)
    (failure,) = [event.failure for event in decoded.events if event.HasField("failure")]
    assert (failure.code, failure.reason) == (9, "NO_DISTRIBUTION")
    assert len(decoded.token_ids) == 100 and decoded.drafted == 0
