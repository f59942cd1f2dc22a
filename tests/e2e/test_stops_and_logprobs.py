"""Texts, token ids, log-probabilities and offsets over HTTP are those of transformers, for random stop strings, whole
and streamed, resumed behind any event, with candidates and without."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import ROOT

PROMPT, TOKENS = "s = 'äöü'\nt = 'äöü'\nu = 'äö", 40
"""What follows has characters of several tokens."""
TARGET = str(ROOT / "models" / "target")
NEAR = 1e-3


@dataclass(frozen=True)
class Reference:
    """Greedy decoding by the library, in float32."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    """Of each token of both but the first."""
    ends: list[int]
    """Characters of the output's text up to and including each token's; of a part of a character those before it."""
    text: str

    def until(self, stop: str) -> tuple[str, int]:
        """The text before the stop string, and the fewest output tokens that carry it."""
        text = self.text.partition(stop)[0]
        return text, next(count for count, end in enumerate(self.ends, 1) if end >= len(text))


@pytest.fixture(scope="module")
def reference() -> Reference:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    prompt = tokenizer(PROMPT).input_ids
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    output = ids[len(prompt) :]
    texts = [tokenizer.decode(output[:count]) for count in range(1, TOKENS + 1)]
    ends = [len(text.removesuffix("\ufffd")) for text in texts]
    assert "\ufffd" not in texts[-1] and len(ends) > len(set(ends))
    logprobs = [float(logits[place, token]) for place, token in enumerate(ids[1:])]
    return Reference(prompt, output, logprobs, ends, texts[-1])


def stops(text: str, count: int) -> list[str]:
    chance = random.Random(11)
    places = [chance.randrange(len(text) - 1) for _ in range(count)]
    return [text[place : place + chance.randint(1, 7)] for place in places]


@dataclass
class Served:
    """What a client has of one choice."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    offsets: tuple[int, ...] = ()

    def add(self, choice: dict[str, Any]) -> None:
        told = choice["logprobs"]
        self.text += choice["text"]
        self.tokens += tuple(choice["token_ids"])
        self.logprobs += tuple(told["token_logprobs"])
        self.offsets += tuple(told["text_offset"])


async def streamed(client: httpx.AsyncClient, asked: dict[str, Any], chance: random.Random) -> tuple[Served, Served]:
    """A stream as it came, and the same one left behind a random event and gone on with."""
    whole, resumed, ids = Served(), Served(), list[str]()
    events = await _events(client, asked, {"x-event-ids": "true"})
    left = chance.randrange(len(events))
    for number, (id, choice) in enumerate(events):
        whole.add(choice)
        if number <= left:
            resumed.add(choice)
            ids.append(id)
    for _, choice in await _events(client, asked, {"last-event-id": ids[-1]}):
        resumed.tokens += tuple(choice["token_ids"])
        resumed.text += choice["text"]
    return whole, resumed


async def _events(
    client: httpx.AsyncClient, asked: dict[str, Any], headers: dict[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    answer = await client.post("/v1/completions", json=asked | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    events, id = list[tuple[str, dict[str, Any]]](), ""
    for line in answer.text.splitlines():
        name, _, value = line.partition(": ")
        if name == "id":
            id = value
        elif name == "data" and value.startswith("{"):
            events += [(id, choice) for choice in json.loads(value)["choices"]]
    return events


async def test_ids_log_probabilities_and_offsets_equal_those_of_transformers_up_to_any_stop_string(
    servers: tuple[str, str], reference: Reference
) -> None:
    chance = random.Random(5)
    async with httpx.AsyncClient(base_url=f"http://{servers[1]}", timeout=120) as client:
        for number, stop in enumerate(stops(reference.text, 14)):
            text, count = reference.until(stop)
            asked = {
                "prompt": PROMPT,
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stop": [stop],
                "logprobs": 1,
                "return_token_ids": True,
                "speculation": {"disabled": number % 3 == 0},
            }
            answer = (await client.post("/v1/completions", json=asked)).json()
            whole = Served()
            whole.add(answer["choices"][0])
            assert (whole.text, list(whole.tokens)) == (text, reference.output[:count]), stop
            assert answer["usage"]["completion_tokens"] == count == len(whole.logprobs)
            assert whole.logprobs == pytest.approx(reference.logprobs[len(reference.prompt) - 1 :][:count], abs=NEAR)
            assert list(whole.offsets) == [0, *reference.ends][:count]
            stream, resumed = await streamed(client, asked, chance)
            assert stream == whole and (resumed.text, resumed.tokens) == (text, whole.tokens)


async def test_an_echo_has_the_prompts_log_probabilities(servers: tuple[str, str], reference: Reference) -> None:
    async with httpx.AsyncClient(base_url=f"http://{servers[1]}", timeout=120) as client:
        asked = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 2, "echo": True}
        (choice,) = (await client.post("/v1/completions", json=asked)).json()["choices"]
    assert choice["text"] == PROMPT + reference.text[: reference.ends[4]]
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None and others == pytest.approx(reference.logprobs[: len(reference.prompt) + 4], abs=NEAR)
    ahead = len(reference.prompt)
    assert choice["logprobs"]["text_offset"][ahead:] == [len(PROMPT) + end for end in (0, *reference.ends[:4])]
