"""Anthropic's messages over HTTP, by the client library that its users have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from slipstream.client.gateway_endpoint import digest, new_key
from slipstream.v1 import verifier_pb2
from tests.support.http_client import CHAT_TEMPLATE, Web, check_speculation, web
from tests.support.scripted_gateway import Setting
from tests.support.sdk_clients import anthropic_client

CALL = '<tool_call>{"name": "weather", "arguments": {"at": "Ärö"}}</tool_call>'
TEXT = f"I look — 日本.\n{CALL}\n{CALL}"
TOOLS: Any = [{"name": "weather", "description": "How warm", "input_schema": {"type": "object"}}]
MESSAGES: Any = [{"role": "user", "content": "How warm?"}]


class Place:
    def __init__(self, setting: Setting, stack: AsyncExitStack, folder: Path) -> None:
        self.folder = folder
        self._setting = setting
        self._stack = stack

    async def start(self, text: str = TEXT, key: str = "any", verifier: Any = None, **options: Any) -> Web:
        (self.folder / "chat.jinja").write_text("{# <tool_call> #}" + CHAT_TEMPLATE)
        self._setting.model.max_length = 1000
        script = [*self._setting.tokenizer.encode(text).ids, self._setting.eos]
        self.verifier = self._setting.verifier(script, **(verifier or {}))
        chat = str(self.folder / "chat.jinja")
        self.web = await web(self._setting, self._stack, self.verifier, chat_template=chat, **options)
        client = anthropic_client(self.web.url, key)
        self.client = await self._stack.enter_async_context(client)
        return self.web

    def prompt(self) -> str:
        return str(self._setting.tokenizer.decode(list(self.verifier.opens()[-1].prefix.token_ids)))


@pytest.fixture
async def place(setting: Setting, tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(setting, stack, tmp_path)


async def test_a_message_is_answered(place: Place) -> None:
    await place.start("Hello there")
    made = await place.client.messages.create(
        model="toy", max_tokens=50, system=[{"type": "text", "text": "Be brief."}], messages=MESSAGES
    )
    assert place.prompt() == "<system>Be brief.\n<user>How warm?\n<assistant>"
    assert [block.text for block in made.content if block.type == "text"] == ["Hello there"]
    assert made.stop_reason == "end_turn" and made.id.startswith("msg_")
    assert made.usage.input_tokens == len(place.prompt()) and made.usage.output_tokens == 12


@pytest.mark.parametrize(
    ("more", "reason", "text"),
    [({"max_tokens": 5}, "max_tokens", "Hello"), ({"stop_sequences": ["the"]}, "stop_sequence", "Hello ")],
)
async def test_each_end_of_a_message_has_its_stop_reason(place: Place, more: Any, reason: str, text: str) -> None:
    await place.start("Hello there")
    asked: Any = {"model": "toy", "max_tokens": 50, "messages": MESSAGES} | more
    made = await place.client.messages.create(**asked)
    assert made.stop_reason == reason and made.content[0].text == text
    assert made.stop_sequence == ("the" if reason == "stop_sequence" else None)


@pytest.mark.parametrize("per_round", [1, 6, 100])
async def test_a_stream_folds_into_the_message(place: Place, per_round: int) -> None:
    await place.start(verifier={"per_round": per_round})
    asked: Any = {"model": "toy", "max_tokens": 300, "messages": MESSAGES, "tools": TOOLS}
    whole = await place.client.messages.create(**asked)
    async with place.client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    for made in (whole, final):
        assert [block.type for block in made.content] == ["text", "tool_use", "tool_use"]
        assert made.content[0].type == "text" and made.content[0].text == "I look — 日本.\n"
        assert made.content[1].type == "tool_use" and made.content[1].input == {"at": "Ärö"}
        assert made.stop_reason == "tool_use" and made.usage.output_tokens == whole.usage.output_tokens
    assert '"parameters": {"type": "object"}' in place.prompt()


async def test_usage_and_speculation_are_those_of_the_session_in_a_stream_too(place: Place) -> None:
    def found(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        done.cached_tokens = 5 if done.base_length == len(place.prompt()) else 0
        return [done]

    await place.start("Hello there", verifier={"mangle": found})
    asked: Any = {"model": "toy", "max_tokens": 50, "messages": MESSAGES, "extra_body": {"cache_salt": "s"}}
    whole = await place.client.messages.create(**asked)
    async with place.client.messages.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    assert place.verifier.opens()[-1].cache_salt == place.verifier.opens()[0].cache_salt == "s"
    [start] = [event for event in events if event.type == "message_start"]
    assert start.message.usage.input_tokens == len(place.prompt())  # nothing is found yet
    [end] = [event for event in events if event.type == "message_delta"]
    for usage in (whole.usage, final.usage, end.usage):
        assert usage.cache_read_input_tokens == 5 and usage.cache_creation_input_tokens == 0
        assert usage.input_tokens == len(place.prompt()) - 5 and usage.output_tokens == 12
    for extra in (whole.model_extra, end.model_extra):
        assert extra and check_speculation(extra["metrics"])["num_spec_steps"] == 4
    asked["extra_body"] = {"speculation": {"disabled": True}}
    assert "metrics" not in ((await place.client.messages.create(**asked)).model_extra or {})


async def test_blocks_of_a_conversation_are_messages_of_the_template(place: Place) -> None:
    await place.start("Hello")
    messages: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "...", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "21"}]},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "ctx", "content": "odd"},
    ]
    await place.client.messages.create(model="toy", max_tokens=10, messages=messages)
    assert place.prompt() == "<user>How warm?\n<assistant>I look.\n<tool>21\n<user>And?\nodd\n<assistant>"


async def test_turns_of_one_role_are_one_turn_and_documents_of_text_are_text(place: Place) -> None:
    """Templates of Llama 2, Mistral and Gemma raise errors for roles that do not alternate."""
    await place.start("Hello")
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    messages: Any = [
        *MESSAGES,
        {"role": "user", "content": [document, {"type": "text", "text": "Say."}]},
        {"role": "assistant", "content": "I"},
        {"role": "assistant", "content": "see"},
    ]
    await place.client.messages.create(model="toy", max_tokens=10, messages=[*messages, *MESSAGES])
    assert place.prompt() == "<user>How warm?\nT\nD\nSay.\n<assistant>I\nsee\n<user>How warm?\n<assistant>"
    await place.client.messages.create(model="toy", max_tokens=10, messages=messages)
    assert place.prompt().endswith("<assistant>I\nsee")  # the answer goes on with it


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    "field",
    [
        {"messages": [*MESSAGES, CALLED, {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]}]},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]},
    ],
)
async def test_fields_that_are_not_served_are_refused_and_reach_no_verifier(place: Place, field: Any) -> None:
    web = await place.start("Hello")
    refused = await web.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 5} | field)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["type"] == "invalid_request_error" and not place.verifier.opens()


async def test_tokens_are_counted_as_the_message_would_use_them(place: Place) -> None:
    await place.start("Hello")
    counted = await place.client.messages.count_tokens(model="toy", messages=MESSAGES, tools=TOOLS)
    made = await place.client.messages.create(model="toy", max_tokens=5, messages=MESSAGES, tools=TOOLS)
    assert counted.input_tokens == made.usage.input_tokens


async def test_errors_have_anthropics_body(place: Place) -> None:
    import anthropic

    await place.start()
    with pytest.raises(anthropic.NotFoundError) as missing:
        await place.client.messages.create(model="other", max_tokens=5, messages=MESSAGES)
    assert missing.value.request_id == missing.value.response.headers["x-request-id"]
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "There is no model 'other'; choose one of toy."},
    }
    for wrong in ({"messages": []}, {"max_tokens": 0}, {"tools": TOOLS, "tool_choice": {"type": "tool"}}):
        answer = await place.web.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 5} | wrong)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    assert (await place.web.post("/v1/messages", {"messages": image, "max_tokens": 5})).status_code == 400


async def test_an_error_in_the_middle_of_a_stream_is_raised_by_the_client(place: Place) -> None:
    import anthropic

    await place.start(verifier={"limit": 9})
    with pytest.raises(anthropic.APIStatusError, match="rolled back"):
        async with place.client.messages.stream(model="toy", max_tokens=50, messages=MESSAGES) as stream:
            async for event in stream:
                if event.type == "message_start":
                    await place.web.front.roll_back(event.message.id.removeprefix("msg_"), 0)


async def test_the_key_comes_in_anthropics_header_on_its_routes_alone(place: Place) -> None:
    key = new_key()
    file = place.folder / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{digest(key).hex()}" }}\n')
    web = await place.start("Hello", key=key, api_keys=str(file))
    assert (await place.client.messages.create(model="toy", max_tokens=5, messages=MESSAGES)).content
    assert (await web.client.get("/v1/models", headers={"x-api-key": key})).status_code == 401
    refused = await web.post("/v1/messages", {}, **{"x-api-key": new_key()})
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"


async def test_a_prompt_that_is_too_long_is_known_by_its_sentence(place: Place) -> None:
    """Clients that shorten a conversation look for it; the route that counts tokens says how many there are."""
    import anthropic

    await place.start()
    long: Any = [{"role": "user", "content": "How warm? " * 200}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        await place.client.messages.create(model="toy", max_tokens=5, messages=long)
    body: Any = refused.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: ")
