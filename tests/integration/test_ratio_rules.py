"""The ratio rules between real services with tiny random models: the first tokens' joint law is the target's."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running as drafter_running
from slipstream.engine.factory import open_engine
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import verifier_pb2
from tests.checkpoints import save_checkpoint
from tests.fleet import drafter, gateway, slowed, until, verifier

VOCABULARY, TOKENS = 4, 3
SESSIONS, AT_ONCE = 600, 100
PROMPT = [1, 3, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft, which differ."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.3}
    place = tmp_path_factory.mktemp("pair")
    target, draft = (save_checkpoint("llama", place / str(seed), seed=seed, **shape) for seed in (0, 1))
    return target, draft


def joint(folder: Path) -> dict[tuple[int, ...], float]:
    """Of the first tokens, by the library's own pass."""
    texts = list(itertools.product(range(VOCABULARY), repeat=TOKENS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logs = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits.double().log_softmax(-1)
    first = len(PROMPT) - 1
    return {
        text: float(torch.stack([row[first + i, token] for i, token in enumerate(text)]).sum().exp())
        for text, row in zip(texts, logs, strict=True)
    }


@pytest.mark.parametrize("rule", ["rejection", "block", "recursive"])
async def test_the_first_tokens_are_distributed_as_the_target_says(rule: str, folders: tuple[Path, Path]) -> None:
    """What was ready when decides which candidates are judged, so the p-value is a fresh draw in every run."""
    target, draft = folders
    expected = joint(target)
    observed = dict.fromkeys(expected, 0)
    drafted = accepted = 0
    async with (
        drafter(open_engine(str(draft), "float32")) as guesses,
        verifier(slowed(open_engine(str(target), "float32"))) as server,
        gateway(server.address) as client,
    ):
        for start in range(0, SESSIONS, AT_ONCE):
            runs = [
                client.decode(
                    PROMPT,
                    tokens=TOKENS + 3,
                    sampling=SamplingParams(seed=seed, acceptance=rule),
                    drafters=[guesses],
                    trusted=True,
                )
                for seed in range(start, start + AT_ONCE)
            ]
            for decoded in await asyncio.gather(*runs):
                assert not any(event.failure.code for event in decoded.events)
                observed[tuple(decoded.token_ids[:TOKENS])] += 1
                drafted, accepted = drafted + decoded.drafted, accepted + decoded.accepted
    p_value = chisquare(list(observed.values()), [SESSIONS * share for share in expected.values()]).pvalue
    print(f"{rule}: {drafted / SESSIONS:.2f} drafted, {accepted / SESSIONS:.2f} accepted, chi-square p = {p_value:.4f}")
    assert accepted > SESSIONS / 8
    assert p_value > 1e-6


@pytest.mark.parametrize("rule", ["rejection", "block", "recursive"])
async def test_a_drafter_that_draws_nothing_says_so_and_the_session_goes_on(rule: str) -> None:
    async with (
        drafter_running(DrafterConfig(method="ngram", listen="127.0.0.1:0", grace_s=0.0)) as guesses,
        verifier(open_engine("emulated:")) as server,
        gateway(server.address) as client,
    ):
        number, decoded = await client.open(
            [1, 2] * 8,
            tokens=100,
            sampling=SamplingParams(seed=1, acceptance=rule),
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
