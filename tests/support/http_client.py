"""A gateway's HTTP API for tests, and what comes back from it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.scripted_gateway import Front, Setting
from tests.support.scripted_verifier import ScriptedVerifier

CHAT_TEMPLATE = """{%- for message in messages -%}
<{{ message.role }}>{{ message.content }}
{% endfor -%}
{%- if tools %}tools: {{ tools | tojson }}
{% endif -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""

SPECULATION_KEYS = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}


def check_speculation(metrics: Any) -> dict[str, Any]:
    """The figures under `metrics` of an answer in which candidates were accepted: as complete as load tools demand
    them, and in agreement with each other."""
    figures: dict[str, Any] = metrics["speculative_decoding"]
    assert set(figures) == SPECULATION_KEYS
    histogram, steps = figures["acceptance_histogram"], figures["num_spec_steps"]
    assert len(histogram) == figures["num_spec_tokens"] + 1 and sum(histogram) == steps > 0
    accepted = sum(length * count for length, count in enumerate(histogram))
    assert accepted == figures["num_accepted_draft_tokens"] > 0
    assert figures["mean_acceptance_length"] == 1 + accepted / steps
    assert figures["draft_acceptance_rate"] == accepted / figures["num_draft_tokens"]
    return figures


@dataclass
class Web:
    front: Front
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return str(self.client.base_url)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def events(self, path: str, body: Any, **headers: str) -> list[Event]:
        async with self.client.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            return [event async for event in events_of(response)]


@dataclass
class Event:
    data: str
    name: str = ""
    id: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.data)


async def events_of(response: httpx.Response) -> AsyncIterator[Event]:
    """The events of a stream, read as the standard says."""
    event = Event("")
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if line and name:
            setattr(event, {"event": "name"}.get(name, name), value)
        elif event.data:
            yield event
            event = Event("")


async def web(setting: Setting, stack: AsyncExitStack, *verifiers: ScriptedVerifier, **config: Any) -> Web:
    return await web_of(await setting.front(*verifiers, http="127.0.0.1:0", **config), stack)


async def web_of(front: Front, stack: AsyncExitStack) -> Web:
    url = f"http://{front.gateway.server.http_address}"
    made = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False)  # it would read certificates
    client = await stack.enter_async_context(made)
    return Web(front, client)
