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
from tests.support.fleet import Decoded, Gateway, drafter, gateway, in_time, slowed, verifier
from tests.support.grammars import END, LANGUAGES, TARGET, grammars, tokenizer
from tests.support.hostile_drafter import Command, HostileDrafter, frame, hostile

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
async def test_log_probabilities_are_the_models_own_with_and_without_candidates(
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


LONG = tokenizer().encode("def read(self, path):\n    return path.read_text()\n\n" * 24).ids


def scores_of(decoded: Decoded) -> list[types_pb2.TokenLogprobs]:
    """Of the prompt, which the first round alone may bring."""
    assert not any(done.prompt_logprobs for done in decoded.rounds[1:])
    return list(decoded.rounds[0].prompt_logprobs)


def check_prompt(model: torch.nn.Module, prompt: list[int], said: list[types_pb2.TokenLogprobs]) -> None:
    """Against log-softmax of the library's own pass over the prompt."""
    with torch.inference_mode():
        shares = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    best = shares.topk(TOP)
    assert len(said) == len(prompt) - 1
    for index, (token, one) in enumerate(zip(prompt[1:], said, strict=True)):
        assert one.logprob == pytest.approx(float(shares[index, token]), abs=1e-4)
        assert list(one.top_logprobs) == pytest.approx(best.values[index].tolist(), abs=1e-4)
        for other, share in zip(one.top_token_ids, one.top_logprobs, strict=True):
            assert share == pytest.approx(float(shares[index, other]), abs=1e-4)


async def test_log_probabilities_of_a_prompt_are_the_models_own_however_it_is_split_or_cached(
    client: Gateway, model: torch.nn.Module
) -> None:
    """A prompt of several steps, one that another session has left in the cache, one of a single token, and ones that
    share their steps with others and with decoding."""
    assert len(LONG) > 256
    plain = await client.decode(LONG, tokens=4)
    said = await client.decode(LONG, tokens=4, prompt_logprobs=TOP)
    check_prompt(model, LONG, scores_of(said))
    assert said.token_ids == plain.token_ids and said.rounds[0].cached_tokens == 0
    assert not scores_of(await client.decode(LONG, tokens=4))
    assert scores_of(await client.decode(PROMPT[:1], tokens=2, prompt_logprobs=0)) == []
    prompts = [PROMPT, LONG[:90], LONG[3:], PROMPT[:2]]
    beside = [await client.open(PROMPT, tokens=60)]
    beside += [await client.open(each, tokens=3, prompt_logprobs=TOP) for each in prompts]
    for (_, decoded), prompt in zip(beside[1:], prompts, strict=True):
        await decoded.done.wait()
        check_prompt(model, prompt, scores_of(decoded))


@pytest.mark.parametrize(("prompt", "top"), [(PROMPT, 21), ((LONG * 6)[:2000], 20)])
async def test_more_of_a_prompt_than_a_message_holds_is_refused(client: Gateway, prompt: list[int], top: int) -> None:
    refused = await client.decode(prompt, tokens=2, prompt_logprobs=top)
    assert refused.end is not None and refused.end.failure.reason == "PROMPT_LOGPROBS"


async def test_log_probabilities_of_a_preempted_prompt_are_complete(model: torch.nn.Module) -> None:
    """Prompts that do not fit together: what a session scored before it gave up its KV is not lost or said twice."""
    engine = open_engine(TARGET, "float32", len(LONG) + 96)
    async with verifier(engine, model=TARGET, prefill_tokens=32) as server, gateway(server.address) as client:
        sessions = await client.open_at_once([LONG, LONG[1:], LONG[2:]], tokens=40, prompt_logprobs=TOP)
        for cut, decoded in enumerate(sessions):
            await decoded.done.wait()
            check_prompt(model, LONG[cut:], scores_of(decoded))


async def test_log_probabilities_of_tokens_behind_a_stop_token_are_cut_with_them(client: Gateway) -> None:
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


async def test_log_probabilities_of_a_reopened_session_are_the_same(
    client: Gateway, guesses: str, model: torch.nn.Module
) -> None:
    text = (await client.decode(PROMPT, tokens=TOKENS)).token_ids
    decoded = await client.decode(PROMPT, tokens=TOKENS, output=text[:11], drafters=[guesses], top_logprobs=TOP)
    assert decoded.token_ids == text[11:]
    check(model, text, [*told(await client.decode(PROMPT, tokens=11, top_logprobs=TOP)), *told(decoded)])


async def test_a_client_that_does_not_ask_gets_no_log_probabilities(client: Gateway, guesses: str) -> None:
    asking, quiet = await asyncio.gather(
        client.decode(PROMPT, tokens=8, drafters=[guesses], top_logprobs=2), client.decode(PROMPT, tokens=8)
    )
    assert len(told(asking)) == 8
    assert not any(done.logprobs for done in quiet.rounds)
