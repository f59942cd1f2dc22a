"""The real model over HTTP with its own chat template: chat, tools, JSON, stop strings, streams, long contexts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import UNMEASURED
from tests.real_model.fleet import Fleet, served
from tests.real_model.prompts import OWN
from tools.real_model import FOLDER

TOKENS = 24
PLAIN = {"speculation": {"disabled": True}}
CONTEXT = 8192
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "price": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "colour", "price"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{fleet.http}/v1", api_key="none", timeout=600, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def exact_fleet(smollm2: Path) -> Iterator[Fleet]:
    """In float32, as a reference computes; it drafts nothing, so that no pass need be timed."""
    with served(smollm2, "--dtype", "float32", "--threads", "1", "--drafter", "none", **UNMEASURED) as fleet:
        yield fleet


@pytest.fixture
async def exact(exact_fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{exact_fleet.http}/v1", api_key="none", timeout=600, max_retries=0
    ) as client:
        yield client


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "", "messages": messages, "max_tokens": TOKENS, "temperature": 0.8, "seed": 7} | more


async def answered(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> tuple[str, str]:
    """The answer's text and why it ended."""
    (choice,) = (await client.chat.completions.create(**asked)).choices
    assert choice.message.content is not None
    return choice.message.content, str(choice.finish_reason)


async def check_both(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> tuple[str, str]:
    """The answer, which is one with speculation and without."""
    plain = await answered(client, asked | {"extra_body": PLAIN})
    assert await answered(client, asked) == plain
    return plain


async def test_a_chat_ends_with_the_model_s_own_end_of_turn(client: openai.AsyncOpenAI) -> None:
    """Of France's capital the first word would be a matter of rounding: it leads by 0.1 in float32, here by 1."""
    text, reason = await check_both(client, chat("What is the capital of Japan?", temperature=0.0))
    assert (text, reason) == ("The capital of Japan is Tokyo.", "stop")


async def test_turns_before_and_a_system_message_reach_the_model(client: openai.AsyncOpenAI) -> None:
    earlier = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "My dog is called Rex."},
        {"role": "assistant", "content": "Nice."},
        {"role": "user", "content": "What is my dog called?"},
    ]
    text, _ = await check_both(client, chat("", messages=earlier, temperature=0.0))
    assert "Rex" in text


async def test_a_stream_is_the_whole_answer_in_pieces(client: openai.AsyncOpenAI) -> None:
    asked = chat(OWN[1])
    whole, _ = await answered(client, asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(pieces) > 2 and "".join(pieces) == whole


async def test_a_json_schema_holds(client: openai.AsyncOpenAI) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    text, reason = await check_both(client, chat(OWN[10], response_format=format, max_tokens=60))
    found = json.loads(text)
    assert reason == "stop" and set(found) == {"name", "colour", "price"}
    assert found["colour"] in ("red", "green", "blue") and 0 <= found["price"] <= 999


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    whole, _ = await answered(client, chat(OWN[9], temperature=0.0))
    stop = whole[len(whole) // 2 :][:3]
    text, reason = await check_both(client, chat(OWN[9], temperature=0.0, stop=[stop]))
    assert (text, reason) == (whole[: whole.index(stop)], "stop")


async def test_logprobs_are_those_of_the_tokens_that_were_chosen(client: openai.AsyncOpenAI) -> None:
    asked = chat(OWN[0], logprobs=True, top_logprobs=3, temperature=0.0)
    on = (await client.chat.completions.create(**asked)).choices[0].logprobs
    off = (await client.chat.completions.create(**asked, extra_body=PLAIN)).choices[0].logprobs
    assert on is not None and off is not None and on.content and on.content == off.content
    assert all(place.token == place.top_logprobs[0].token for place in on.content)


async def test_tools_are_refused_because_the_template_takes_none(fleet: Fleet) -> None:
    """The model would never see them, and its answer would be taken for one that needed none."""
    async with httpx.AsyncClient(base_url=f"http://{fleet.http}", timeout=60, trust_env=False) as web:
        answer = await web.post("/v1/chat/completions", json=chat("Weather?", tools=[TOOL]))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "no_tools"


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_context_of_eight_thousand_tokens_is_read_whole(client: openai.AsyncOpenAI) -> None:
    sentences = [f"Entry {number}: the value of item {number} is {number * 7919 % 1000}." for number in range(400)]
    asked = chat(" ".join(sentences) + " Summarise the entries.", temperature=0.0, max_tokens=64)
    made = await client.chat.completions.create(**asked, extra_body=PLAIN)
    assert made.usage is not None and CONTEXT - 700 < made.usage.prompt_tokens < CONTEXT - 64
    assert (await client.chat.completions.create(**asked)).choices[0].message == made.choices[0].message


async def test_a_prompt_beyond_the_context_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**chat("word " * (CONTEXT + 8)))
    assert caught.value.code == "context_length_exceeded"


def likelihoods(text: str) -> tuple[list[int], torch.Tensor]:
    """The text's tokens, and by the library's own pass in float32 what each place gives every token: [T - 1, V]."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokens = tokenizer(text)["input_ids"]
    with torch.inference_mode():
        return tokens, model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


@pytest.mark.long
async def test_log_probabilities_of_a_prompt_as_lm_eval_requests_them_equal_the_librarys(
    exact: openai.AsyncOpenAI,
) -> None:
    """Token ids of a context with its continuation, echoed with one likeliest token each; what is scored is the
    continuation, by the numbers and by whether it is what the model would say."""
    text = "\n".join(["The capital of France is Paris.", *OWN[:6]])
    tokens, shares = likelihoods(text)
    best = shares.max(-1)
    for number in (1, 0):
        made = await exact.completions.create(
            model="", prompt=tokens, echo=True, logprobs=1, max_tokens=number, temperature=0.0, seed=1
        )
        logprobs = made.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(tokens) + number
        assert logprobs.token_logprobs[0] is None
        for place, token in enumerate(tokens[1:]):
            said, top = logprobs.token_logprobs[place + 1], logprobs.top_logprobs[place + 1]
            assert said == pytest.approx(float(shares[place, token]), abs=1e-3)
            greedy = int(best.indices[place]) == token
            assert (said == max(top.values())) == greedy
