"""A stream over HTTP goes on where its client left it: on any gateway of the store, exactly what is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from tests.support.http_client import CHAT_TEMPLATE, Event, Web, events_of, web, web_of
from tests.support.scripted_gateway import Setting

IDS = {"x-event-ids": "true"}


class Pair:
    """Two gateways of one store."""

    def __init__(self, setting: Setting, stack: AsyncExitStack, folder: Path) -> None:
        (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
        self._config: Any = {"chat_template": str(folder / "chat.jinja"), "http": "127.0.0.1:0"}
        self.setting = setting
        self._stack = stack
        self._backend = MemoryBackend()

    def _store(self, owner: str) -> MemoryStore:
        return MemoryStore(self._backend, owner=owner, ttl_s=60, lease_s=60)

    async def start(self, **options: Any) -> tuple[Web, Web]:
        self.verifier = self.setting.verifier(**options)
        config = {name: value for name, value in self._config.items() if name != "http"}
        first = await web(self.setting, self._stack, self.verifier, store=self._store("first"), **config)
        beside = await self.setting.beside(first.front, self._store("second"), **self._config)
        return first, await web_of(beside, self._stack)

    def text(self, tokens: int) -> str:
        return str(self.setting.tokenizer.decode(self.verifier.script[:tokens]))


@pytest.fixture
async def pair(setting: Setting, tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        yield Pair(setting, stack, tmp_path)


def text(events: list[Event]) -> str:
    choices = [event.json["choices"][0] for event in events if event.data != "[DONE]"]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def body(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Tell me."}
    return {**prompt, "max_tokens": 60, "stream": True, "seed": 4} | more


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_running_session_goes_on_at_another_gateway(pair: Pair, path: str) -> None:
    first, second = await pair.start(limit=17)
    had: list[Event] = []
    async with first.client.stream("POST", path, json=body(path), headers=IDS) as reading:
        async for event in events_of(reading):
            had.append(event)
            if len(text(had)) > 8:
                break
    assert all(event.id for event in had)
    pair.verifier.limit = None
    rest = await second.events(path, body(path), **{"last-event-id": had[-1].id})
    assert rest[-1].data == "[DONE]" and rest[-2].json["choices"][0]["finish_reason"] == "length"
    assert text(had + rest) == pair.text(60)
    assert not any("role" in event.json["choices"][0].get("delta", {}) for event in rest[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_ended_session_is_streamed_again_from_behind_every_event(pair: Pair, path: str) -> None:
    first, second = await pair.start(per_round=4)
    asked = body(path, stream_options={"include_usage": True}, return_token_ids=True)
    whole = await first.events(path, asked, **IDS)
    usage = whole[-2].json["usage"]
    for index, event in enumerate(whole[:-2]):
        rest = await second.events(path, asked, **{"last-event-id": event.id})
        assert text([*whole[: index + 1], *rest[:-2]]) == pair.text(60)
        tokens = [token for each in (*whole[: index + 1], *rest[:-2]) for token in each.json["choices"][0]["token_ids"]]
        assert tokens == pair.verifier.script[:60]
        assert rest[-2].json["usage"] == usage


async def test_ids_are_given_only_to_clients_that_ask_for_them(pair: Pair) -> None:
    first, _ = await pair.start()
    path = "/v1/completions"
    assert not any(event.id for event in await first.events(path, body(path)))
    assert all(event.id for event in (await first.events(f"{path}?event_ids=true", body(path)))[:-1])


@pytest.mark.parametrize("given", ["nonsense", "a:b:c:d", "x:1:2", "x" * 65 + ":1:2:0", "missing:1:2:0", "a:-1:0:0"])
async def test_an_invalid_event_id_is_refused(pair: Pair, given: str) -> None:
    first, _ = await pair.start()
    answer = await first.post("/v1/completions", body("/v1/completions"), **{"last-event-id": given})
    assert answer.status_code in (400, 404)


async def test_a_rolled_back_session_does_not_go_on_as_if_nothing_had_happened(pair: Pair) -> None:
    first, second = await pair.start()
    path = "/v1/completions"
    whole = await first.events(path, body(path), **IDS)
    await first.front.roll_back(whole[0].json["id"].removeprefix("cmpl-"), 2)
    answer = await second.post(path, body(path), **{"last-event-id": whole[3].id})
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "rolled_back"
    assert answer.headers["x-should-retry"] == "false"


async def test_several_choices_have_no_ids(pair: Pair) -> None:
    first, _ = await pair.start()
    answer = await first.post("/v1/completions", body("/v1/completions", n=2), **IDS)
    assert answer.status_code == 400
