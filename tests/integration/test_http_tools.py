"""Tools over HTTP: in the prompt by the model's template, and out of its text as calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.front import Setting
from tests.web import CHAT_TEMPLATE, Web, web

CALL = '<tool_call>\n{"name": "weather", "arguments": {"at": "Ärö"}}\n</tool_call>'
TEXT = f"I look.\n{CALL}\n{CALL}"
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    }
]
MESSAGES: Any = [{"role": "user", "content": "How warm?"}]
HERMES = "{# <tool_call> #}" + CHAT_TEMPLATE


class Place:
    def __init__(self, setting: Setting, stack: AsyncExitStack, folder: Path) -> None:
        self._setting = setting
        self._stack = stack
        self._folder = folder

    async def start(self, template: str = HERMES, text: str = TEXT, **options: Any) -> Web:
        (self._folder / "chat.jinja").write_text(template)
        self._setting.model.max_length = 1000
        script = [*self._setting.tokenizer.encode(text).ids, self._setting.eos]
        self.verifier = self._setting.verifier(script, **options.pop("verifier", {}))
        chat = str(self._folder / "chat.jinja")
        self.web = await web(self._setting, self._stack, self.verifier, chat_template=chat, **options)
        client = openai.AsyncOpenAI(base_url=f"{self.web.url}/v1", api_key="any", max_retries=0, timeout=60)
        self.openai = await self._stack.enter_async_context(client)
        return self.web


@pytest.fixture
async def place(setting: Setting, tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(setting, stack, tmp_path)


async def test_calls_are_returned_and_their_results_answered(place: Place) -> None:
    await place.start()
    made = await place.openai.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, max_tokens=190)
    choice = made.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look.\n"
    calls = choice.message.tool_calls
    assert calls is not None and len({call.id for call in calls}) == 2
    for call in calls:
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"at": "Ärö"}
    prompt = place._setting.tokenizer.decode(list(place.verifier.opens()[-1].prefix.token_ids))
    assert json.dumps(TOOLS) in prompt
    answered = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "21"}]
    await place.openai.chat.completions.create(model="toy", messages=answered, max_tokens=5)
    prompt = place._setting.tokenizer.decode(list(place.verifier.opens()[-1].prefix.token_ids))
    assert "<tool>21" in prompt and "tools:" not in prompt


@pytest.mark.parametrize("per_round", [1, 7, 100])
async def test_a_stream_gives_the_same_calls_however_rounds_cut_the_text(place: Place, per_round: int) -> None:
    await place.start(verifier={"per_round": per_round})
    stream = await place.openai.chat.completions.create(
        model="toy", messages=MESSAGES, tools=TOOLS, max_tokens=190, stream=True
    )
    content, calls, reasons = "", {}, []
    async for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            calls[call.index] = (call.function.name, call.function.arguments)
    assert content == "I look.\n" and reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert calls == dict.fromkeys(range(2), ("weather", '{"at": "Ärö"}'))


async def test_a_stream_of_calls_goes_on_behind_any_event(place: Place) -> None:
    web = await place.start(verifier={"per_round": 5})
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 190, "stream": True, "return_token_ids": True}
    whole = await web.events("/v1/chat/completions", body, **{"x-event-ids": "true"})
    assert len(whole) > 6
    for index, event in enumerate(whole[:-1]):
        again = await web.events("/v1/chat/completions", body, **{"last-event-id": event.id})
        assert joined(whole[: index + 1] + again) == joined(whole)


def joined(events: list[Any]) -> tuple[str, list[Any], list[int], str]:
    choices = [event.json["choices"][0] for event in events if event.data != "[DONE]"]
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    return content, calls, [t for choice in choices for t in choice["token_ids"]], choices[-1]["finish_reason"]


async def test_without_tools_nothing_is_read_as_a_call(place: Place) -> None:
    await place.start()
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        made = await place.web.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 190} | more)
        choice = made.json()["choices"][0]
        assert choice["message"]["content"] == TEXT and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


async def test_a_format_that_is_not_known_is_refused_and_can_be_set(place: Place) -> None:
    asked = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 190}
    web = await place.start(template=CHAT_TEMPLATE)
    refused = await web.post("/v1/chat/completions", asked)
    assert refused.status_code == 400 and "GATEWAY_TOOL_CALLS" in refused.json()["error"]["message"]
    web = await place.start(template=CHAT_TEMPLATE, tool_calls="hermes")
    assert (await web.post("/v1/chat/completions", asked)).json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "field",
    [
        {"tool_choice": {"type": "function", "function": {"name": "unknown"}}},
        {"tool_choice": {"type": "custom", "name": "weather"}},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [{"type": "retrieval"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    ],
)
async def test_what_is_not_served_of_tools_is_refused(place: Place, field: Any) -> None:
    web = await place.start()
    answer = await web.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS} | field)
    assert answer.status_code == 400 and not place.verifier.opens()


async def test_a_forced_call_is_what_the_verifier_holds_the_output_to(place: Place) -> None:
    web = await place.start(text=CALL)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    made = await place.openai.chat.completions.create(
        model="toy", messages=MESSAGES, tools=TOOLS, tool_choice=named, max_tokens=190
    )
    assert [call.function.name for call in made.choices[0].message.tool_calls or ()] == ["weather"]
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    asked = {"input": "How warm?", "tools": flat, "max_output_tokens": 190}
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = await web.post("/v1/responses", asked | {"tool_choice": choice})
        assert [item["type"] for item in answer.json()["output"]] == ["function_call"]
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        asked = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 190}
        assert [block["type"] for block in (await web.post("/v1/messages", asked)).json()["content"]] == ["tool_use"]
    grammars = [each.structured_output.grammar for each in place.verifier.opens()]
    assert len(grammars) == 5 and set(grammars) == {grammars[0]} and '"weather"' in grammars[0]
    await web.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"})
    assert not place.verifier.opens()[-1].HasField("structured_output")
