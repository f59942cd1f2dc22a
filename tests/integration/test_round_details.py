"""What a client is told of rounds, by a gateway, a verifier and a drafter whose models are emulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.support.emulated_system import EmulatedSystem, emulated_system
from tests.support.http_client import CHAT_TEMPLATE, events_of, web
from tests.support.scripted_gateway import Setting


@pytest.fixture
async def system() -> AsyncIterator[EmulatedSystem]:
    async with emulated_system() as system:
        yield system


async def _chunks(url: str, path: str = "/v1/completions", **asked: Any) -> list[Any]:
    body = {"prompt": "def read(", "max_tokens": 48, "seed": 7, "temperature": 0.0, "stream": True, **asked}
    if "messages" in asked:
        del body["prompt"]
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        client.stream("POST", path, json={**body, "stream_options": {"include_usage": True}}) as response,
    ):
        assert response.status_code == 200, await response.aread()
        return [event.json async for event in events_of(response) if event.data != "[DONE]"]


def _choices(chunks: list[Any]) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def _rounds(chunks: list[Any]) -> list[Any]:
    return [each for choice in _choices(chunks) for each in choice.get("speculation", {"rounds": []})["rounds"]]


async def _with_drafts(system: EmulatedSystem) -> list[Any]:
    """The chunks of a request that met a drafter which was ready: candidates that come too late are not verified."""
    async with asyncio.timeout(60):
        while True:
            chunks = await _chunks(system.url, speculation={"rounds": True})
            if any(each["accepted"] for each in _rounds(chunks)):
                return chunks


async def test_every_token_has_an_origin_and_the_sums_are_those_of_the_answer(system: EmulatedSystem) -> None:
    chunks = await _with_drafts(system)
    rounds = _rounds(chunks)
    assert [each["round"] for each in rounds] == sorted({each["round"] for each in rounds})
    for former, latter in pairwise(rounds):
        assert latter["offset"] == former["offset"] + len(former["tokens"])
        assert latter["at_ms"] >= former["at_ms"] > 0
    figures = chunks[-1]["metrics"]["speculative_decoding"]
    assert sum(each["drafted"] for each in rounds) == figures["num_draft_tokens"]
    assert sum(each["accepted"] for each in rounds) == figures["num_accepted_draft_tokens"]
    assert sum(len(each["tokens"]) for each in rounds) == chunks[-1]["usage"]["completion_tokens"]
    for each in rounds:
        origins = [token["origin"] for token in each["tokens"]]
        assert origins[: each["accepted"]] == ["drafted"] * each["accepted"]
        assert set(origins[each["accepted"] :]) <= ({"bonus", "recovered"} if each["drafted"] else {"plain"})
        assert all(token["drafters"] == ["model"] for token in each["tokens"][: each["accepted"]])
        assert each["verify_ms"] > 0


async def test_the_texts_of_the_tokens_join_to_the_text(system: EmulatedSystem) -> None:
    chunks = await _chunks(system.url, speculation={"rounds": True})
    text = "".join(choice["text"] for choice in _choices(chunks))
    told = "".join(token["text"] for each in _rounds(chunks) for token in each["tokens"])
    assert told and text.startswith(told)  # behind it stands what an incomplete character becomes


async def test_drafting_is_timed(system: EmulatedSystem) -> None:
    spans = [span for each in _rounds(await _with_drafts(system)) for span in each["drafts"]]
    assert spans
    for span in spans:
        assert span["drafter"] == "model" and span["candidates"] > 0 and span["began_ms"] >= span["ended_ms"] >= 0


async def test_clients_that_do_not_ask_get_no_round_details_and_the_same_text(system: EmulatedSystem) -> None:
    told, plain = await _chunks(system.url, speculation={"rounds": True}), await _chunks(system.url)
    assert _rounds(told) and not _rounds(plain) and not any("speculation" in choice for choice in _choices(plain))
    texts = ["".join(choice["text"] for choice in _choices(chunks)) for chunks in (told, plain)]
    assert texts[0] == texts[1]


async def test_a_verifier_is_asked_for_round_details_only_when_the_client_asks(setting: Setting) -> None:
    async with AsyncExitStack() as stack:
        verifier = setting.verifier()
        served = await web(setting, stack, verifier)
        await _chunks(served.url, speculation={"rounds": True})
        await _chunks(served.url)
        assert [opened.round_details for opened in verifier.opens()] == [True, False]


async def test_a_chat_has_rounds_too(setting: Setting, tmp_path: Any) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier(), chat_template=str(template))
        asked = {"messages": [{"role": "user", "content": "Hello"}], "speculation": {"rounds": True}}
        chunks = await _chunks(served.url, "/v1/chat/completions", **asked)
    text = "".join(choice["delta"].get("content", "") for choice in _choices(chunks))
    assert text == "".join(token["text"] for each in _rounds(chunks) for token in each["tokens"])


async def test_tokens_behind_a_stop_string_show_no_text(setting: Setting) -> None:
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier())
        chunks = await _chunks(served.url, stop=["lief"], speculation={"rounds": True})
    text = "".join(choice["text"] for choice in _choices(chunks))
    told = "".join(token["text"] for each in _rounds(chunks) for token in each["tokens"])
    assert "lief" not in told and text.startswith(told)
