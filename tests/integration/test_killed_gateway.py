"""A gateway that is killed (SIGKILL) while it streams: over gRPC and HTTP its clients go on with exactly the missing
tokens on another gateway of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream import AsyncClient
from tests.support.gateway_process import gateway_process, ready_line
from tests.support.http_client import Event, events_of
from tests.support.scripted_gateway import Setting
from tests.support.scripted_verifier import served

TOKENS = 40
BEFORE = 8
"""Tokens of each session that are written before the gateway is killed."""
COMPLETION = {"prompt": "Tell me.", "max_tokens": TOKENS, "stream": True, "return_token_ids": True}
RESPONSE = {"input": "Tell me.", "max_output_tokens": TOKENS, "stream": True}


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


class Reading:
    """A stream of HTTP, read as far as it goes."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        self._events = events_of(response)
        self.had: list[Event] = []

    async def text(self, length: int) -> str:
        """What was said, once that is `length` characters."""
        async with asyncio.timeout(60):
            while len(said(self.had)) < length:
                self.had.append(await anext(self._events))
        return said(self.had)

    async def rest(self) -> list[Event]:
        return [event async for event in self._events]


def said(events: list[Event]) -> str:
    found = [event.json for event in events if event.data != "[DONE]"]
    return "".join(each["choices"][0]["text"] if "choices" in each else each.get("delta", "") for each in found)


async def test_clients_of_a_killed_gateway_receive_exactly_the_missing_tokens_from_another_one(
    setting: Setting, folder: Path, redis_url: str, stack: AsyncExitStack, tmp_path: Path
) -> None:
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    verifier = setting.verifier(limit=BEFORE)
    address, _ = await stack.enter_async_context(served(verifier))
    settings = {"store": redis_url, "lease_s": "2", "http": "127.0.0.1:0", "chat_template": str(tmp_path / "template")}
    first = await stack.enter_async_context(gateway_process(folder, address, **settings))
    second = await stack.enter_async_context(gateway_process(folder, address, **settings))
    ready = [await ready_line(first), await ready_line(second)]
    client = await stack.enter_async_context(AsyncClient([each["grpc"] for each in ready]))
    webs = [
        await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{each['http']}", timeout=60, trust_env=False)
        )
        for each in ready
    ]

    async def post(number: int, path: str, body: Any, **headers: str) -> Reading:
        asked = webs[number].stream("POST", path, json=body, headers=headers)
        return Reading(await stack.enter_async_context(asked))

    begun, whole = (setting.tokenizer.decode(verifier.script[:length]) for length in (BEFORE, TOKENS))
    stream = client.stream("Tell me.", max_tokens=TOKENS)
    heard: list[Any] = []
    while sum(len(piece.token_ids) for piece in heard) < BEFORE:
        heard.append(await stream.read())
    completing = await post(0, "/v1/completions", COMPLETION, **{"x-event-ids": "true"})
    responding = await post(0, "/v1/responses", RESPONSE)
    for reading in (completing, responding):
        assert await reading.text(len(begun)) == begun

    first.kill()
    verifier.limit = None

    heard += [piece async for piece in stream]
    position = 0
    for piece in heard:
        assert piece.offset == position
        position += len(piece.token_ids)
    assert [token for piece in heard for token in piece.token_ids] == verifier.script[:TOKENS]
    assert "".join(piece.text for piece in heard) == whole

    again = await post(1, "/v1/completions", COMPLETION, **{"last-event-id": completing.had[-1].id})
    rest = await again.rest()
    assert begun + said(rest) == whole
    events = [*completing.had, *rest[:-1]]
    tokens = [token for event in events for token in event.json["choices"][0]["token_ids"]]
    assert tokens == verifier.script[:TOKENS]

    name, number = responding.had[0].json["response"]["id"], responding.had[-1].json["sequence_number"]
    read = webs[1].stream("GET", f"/v1/responses/{name}?stream=true&starting_after={number}")
    rest = await Reading(await stack.enter_async_context(read)).rest()
    assert begun + said(rest) == whole
    assert rest[0].json["sequence_number"] > number
    assert rest[-1].json["response"]["output"][0]["content"][0]["text"] == whole
    assert rest[-1].json["response"]["usage"]["output_tokens"] == TOKENS
