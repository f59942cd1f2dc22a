"""Log-probabilities through real services with the shipped pair in fp32: with candidates what they are without, and
what the library's own pass says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.engine.factory import open_engine
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import drafter_pb2, types_pb2
from tests.fleet import Decoded, Gateway, drafter, gateway, in_time, slowed, verifier
from tests.grammars import END, LANGUAGES, TARGET, grammars, tokenizer
from tests.hostile_drafter import Command, HostileDrafter, frame, hostile

PROMPT = tokenizer().encode("def read(self, path):").ids
TOKENS, TOP = 32, 4
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, seed=4, top_k=20, repetition_penalty=1.3, logit_bias={7: 3.0}),
    SamplingParams(temperature=1.0, seed=5, acceptance="rejection"),
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture
async def client() -> AsyncIterator[Gateway]:
    async with (
        verifier(slowed(open_engine(TARGET, "float32", 8192)), model=TARGET) as server,
        gateway(server.address) as client,
    ):
        yield client


@pytest.fixture
async def guesses() -> AsyncIterator[str]:
    async with drafter(open_engine(str(Path(TARGET).parent / "draft"), "float32"), grammars=grammars()) as address:
        yield address


def told(decoded: Decoded) -> list[types_pb2.TokenLogprobs]:
    """One for each output token."""
    assert all(len(done.logprobs) == len(done.token_ids) for done in decoded.rounds)
    return [each for done in decoded.rounds for each in done.logprobs]


def check(model: torch.nn.Module, output: list[int], said: list[types_pb2.TokenLogprobs]) -> None:
    """Against log-softmax of the library's own pass over the whole text."""
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    shares = logits.log_softmax(-1)
    best = shares.topk(TOP)
    for index, (token, one) in enumerate(zip(output, said, strict=True)):
        assert one.logprob == pytest.approx(float(shares[index, token]), abs=1e-4)
        assert list(one.top_logprobs) == pytest.approx(best.values[index].tolist(), abs=1e-4)
        for other, share in zip(one.top_token_ids, one.top_logprobs, strict=True):
            assert share == pytest.approx(float(shares[index, other]), abs=1e-4)


@pytest.mark.parametrize("structure", [None, LANGUAGES["schema"].structure], ids=["free", "schema"])
async def test_they_are_the_models_own_with_and_without_candidates(
    client: Gateway, guesses: str, model: torch.nn.Module, structure: StructuredOutput | None
) -> None:
    """Neither temperature, penalties, bias nor a grammar enters."""
    stop = [END] if structure is not None else []

    async def decode(sampling: SamplingParams, drafters: list[str]) -> Decoded:
        options = {"tokens": TOKENS, "stop": stop, "structure": structure, "top_logprobs": TOP, "trusted": True}
        return await client.decode(PROMPT, sampling=sampling, drafters=drafters, **options)

    plain = await asyncio.gather(*(decode(sampling, []) for sampling in SAMPLINGS))
    for one in plain:
        check(model, one.token_ids, told(one))

    async def helped() -> bool:
        drafted = await asyncio.gather(*(decode(sampling, [guesses]) for sampling in SAMPLINGS))
        for one in drafted:
            check(model, one.token_ids, told(one))
        for sampling, without, with_them in zip(SAMPLINGS, plain, drafted, strict=True):
            if sampling.acceptance == "coupled":
                assert with_them.token_ids == without.token_ids
                assert [list(one.top_token_ids) for one in told(with_them)] == [
                    list(one.top_token_ids) for one in told(without)
                ]
        return sum(decoded.accepted for decoded in drafted) > 0

    assert await in_time(helped)


async def test_those_of_tokens_that_are_cut_are_cut_with_them(client: Gateway) -> None:
    """A stop token in the middle of a round: the drafter knows the whole text."""
    text = (await client.decode(PROMPT, tokens=TOKENS)).token_ids

    def knowing(drafter: HostileDrafter, command: Command) -> list[drafter_pb2.DraftResponse]:
        return [frame(command, text)] if command.HasField("open") else []

    async with hostile(knowing) as prophet:
        for stop in sorted(set(text)):
            options = {"tokens": TOKENS, "max_draft_tokens": 16, "drafters": [prophet.address], "top_logprobs": 0}
            decoded = await client.decode(PROMPT, stop=[stop], **options)
            assert decoded.token_ids == text[: text.index(stop) + 1]
            assert all(not one.top_token_ids for one in told(decoded))


async def test_elsewhere_they_are_the_same(client: Gateway, guesses: str, model: torch.nn.Module) -> None:
    text = (await client.decode(PROMPT, tokens=TOKENS)).token_ids
    decoded = await client.decode(PROMPT, tokens=TOKENS, output=text[:11], drafters=[guesses], top_logprobs=TOP)
    assert decoded.token_ids == text[11:]
    check(model, text, [*told(await client.decode(PROMPT, tokens=11, top_logprobs=TOP)), *told(decoded)])


async def test_who_does_not_ask_is_told_nothing(client: Gateway, guesses: str) -> None:
    asking, quiet = await asyncio.gather(
        client.decode(PROMPT, tokens=8, drafters=[guesses], top_logprobs=2), client.decode(PROMPT, tokens=8)
    )
    assert len(told(asking)) == 8
    assert not any(done.logprobs for done in quiet.rounds)
