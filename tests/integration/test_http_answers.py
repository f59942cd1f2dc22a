"""Reasoning and calls as models' makers published them, out of special tokens, through the clients that users have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.v1 import types_pb2
from tests.integration.test_http_responses import folded
from tests.support.http_client import CHAT_TEMPLATE, Web, events_of, web, web_of
from tests.support.model_answers import PUBLISHED, TEMPLATES, Call, Published, Reasoning
from tests.support.scripted_gateway import Setting, with_logprobs
from tests.support.sdk_clients import anthropic_client, openai_client
from tests.support.toy_tokenizer import toy_tokenizer

OPENS = """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think></think>
{%- elif add_generation_prompt %}<think>
{% endif %}"""
MESSAGES: Any = [{"role": "user", "content": "How warm?"}]
ALL = pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each.source)


class Place:
    """A gateway of a model that answers as published, with the marks of its format as special tokens."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack

    async def start(self, published: Published, template: str = CHAT_TEMPLATE, per_round: int = 7) -> Web:
        marks = [*dict.fromkeys(published.format.marks)]
        self.setting = setting = Setting(toy_tokenizer(self._folder, marks), self._stack)
        setting.model.max_length = 3000
        hints = TEMPLATES.get(published.calls, "").replace("{", "").replace("}", "")
        thinks = "</think>" if published.thoughts == "think" else ""
        opens = OPENS if published.opened else ""
        (self._folder / "chat.jinja").write_text(f"{{# {hints}{thinks} #}}{template}{opens}")
        script = [*setting.tokenizer.encode(published.text).ids, setting.eos]
        self.verifier = setting.verifier(script, per_round=per_round)
        self._store, chat = MemoryBackend(), str(self._folder / "chat.jinja")
        store = MemoryStore(self._store, owner="first", ttl_s=60, lease_s=60)
        self.web = await web(setting, self._stack, self.verifier, store=store, chat_template=chat)
        client = openai_client(self.web.url)
        self.openai = await self._stack.enter_async_context(client)
        other = anthropic_client(self.web.url)
        self.anthropic = await self._stack.enter_async_context(other)
        return self.web

    async def second(self) -> Web:
        """Another gateway of the same store."""
        store = MemoryStore(self._store, owner="second", ttl_s=60, lease_s=60)
        chat = str(self._folder / "chat.jinja")
        beside = await self.setting.beside(self.web.front, store, http="127.0.0.1:0", chat_template=chat)
        return await web_of(beside, self._stack)

    def prompt(self) -> str:
        tokens = list(self.verifier.opens()[-1].prefix.token_ids)
        return str(self.setting.tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(tmp_path, stack)


def tools(published: Published) -> list[dict[str, Any]]:
    """The tools of OpenAI's chat."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {key: {"type": each[0]} for key, each in types.items()}},
            },
        }
        for name, types in published.tools.items()
    ]


def reasoning_tokens(place: Place, published: Published) -> int:
    """Between the marks, each of which is a token; a byte is one, too."""
    text = published.text
    for begin, end in (("<|channel|>analysis<|message|>", "<|end|>"), ("<think>", "</think>")):
        if end in text:
            return len((text if published.opened else text.partition(begin)[2]).partition(end)[0].encode())
    return 0


def split(published: Published) -> tuple[str, str, list[tuple[str, Any]]]:
    """Text, reasoning and calls."""
    wanted = published.wanted
    text = "".join(each for each in wanted if isinstance(each, str))
    reasoning = "".join(each.text for each in wanted if isinstance(each, Reasoning))
    calls = [(each.name, json.loads(each.arguments)) for each in wanted if isinstance(each, Call)]
    return text, reasoning, calls


@ALL
async def test_clients_receive_text_reasoning_and_tool_calls(place: Place, published: Published) -> None:
    await place.start(published)
    await check_chat(place, published)
    await check_responses(place, published)
    await check_messages(place, published)


async def check_chat(place: Place, published: Published) -> None:
    asked: Any = {"model": "toy", "messages": MESSAGES, "tools": tools(published) or openai.NOT_GIVEN}
    answer = await place.openai.chat.completions.create(**asked)
    message, usage = answer.choices[0].message, answer.usage
    assert usage is not None and usage.completion_tokens_details is not None
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    extra = message.model_extra or {}
    assert usage.completion_tokens_details.reasoning_tokens == reasoning_tokens(place, published)
    assert (message.content or "", extra.get("reasoning", ""), calls) == split(published)
    assert extra.get("reasoning_content") == extra.get("reasoning")
    async with place.openai.chat.completions.stream(**asked) as stream:
        reasoning = ""
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                reasoning += (event.chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        streamed = (await stream.get_final_completion()).choices[0]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in streamed.message.tool_calls or ()]
    assert (streamed.message.content or "", reasoning, calls) == split(published)
    assert streamed.finish_reason == ("tool_calls" if calls else "stop")


async def check_responses(place: Place, published: Published) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in tools(published)]
    async with place.openai.responses.stream(model="toy", input="How warm?", tools=flat) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_response()
    made = await place.openai.responses.create(model="toy", input="How warm?", tools=flat)
    text, reasoning, calls = split(published)
    for response in (made, streamed):
        found = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
        thoughts = [item for item in response.output if item.type == "reasoning"]
        assert (response.output_text, found) == (text, calls)
        assert "".join(part.text for item in thoughts for part in item.content or ()) == reasoning
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == reasoning_tokens(place, published)
    assert ("response.reasoning_text.delta" in kinds) == bool(reasoning)
    assert ("response.function_call_arguments.delta" in kinds) == bool(calls)
    await place.openai.responses.create(model="toy", input="More?", previous_response_id=made.id)


async def check_messages(place: Place, published: Published) -> None:
    given: Any = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools(published)
    ]
    asked: Any = {"model": "toy", "max_tokens": 1000, "messages": MESSAGES, "tools": given}
    made = await place.anthropic.messages.create(**asked)
    async with place.anthropic.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    text, reasoning, calls = split(published)
    for message in (made, streamed):
        assert "".join(block.text for block in message.content if block.type == "text") == text
        thoughts = [block for block in message.content if block.type == "thinking"]
        assert "".join(block.thinking for block in thoughts) == reasoning and all(each.signature for each in thoughts)
        assert [(block.name, block.input) for block in message.content if block.type == "tool_use"] == calls
        assert message.stop_reason == ("tool_use" if calls else "end_turn")


@pytest.mark.parametrize(
    "published", [each for each in PUBLISHED if len(each.wanted) > 1][:1] + PUBLISHED[-3:], ids=lambda each: each.source
)
async def test_another_gateway_continues_the_stream_behind_every_event(place: Place, published: Published) -> None:
    first = await place.start(published, per_round=3)
    second = await place.second()
    flat = [{"type": "function", **tool["function"]} for tool in tools(published)]
    whole = await first.events("/v1/responses", {"input": "Hi", "tools": flat, "stream": True})
    name = whole[0].json["response"]["id"]
    for index, event in enumerate(whole):
        after = f"/v1/responses/{name}?stream=true&starting_after={event.json['sequence_number']}"
        async with second.client.stream("GET", after) as response:
            rest = [event async for event in events_of(response)]
        assert folded(whole[: index + 1] + rest) == folded(whole)
    body = {"messages": MESSAGES, "tools": tools(published), "stream": True}
    chunks = await first.events("/v1/chat/completions", body, **{"x-event-ids": "true"})
    for index, event in enumerate(chunks[:-1]):
        rest = await second.events("/v1/chat/completions", body, **{"last-event-id": event.id})
        assert said(chunks[: index + 1] + rest) == said(chunks)


def said(chunks: list[Any]) -> tuple[str, str, str]:
    deltas = [chunk.json["choices"][0]["delta"] for chunk in chunks if chunk.data != "[DONE]"]
    arguments = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    return (
        "".join(delta.get("content", "") for delta in deltas),
        "".join(delta.get("reasoning", "") for delta in deltas),
        "".join(arguments),
    )


REASONED = next(each for each in PUBLISHED if each.opened)
SWITCH = CHAT_TEMPLATE + "[{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }},{{ more }}]"
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
KWARGS = {"chat_template_kwargs": {"more": 1, "enable_thinking": True}}


@pytest.mark.parametrize(
    ("path", "field", "wanted"),
    [
        (CHAT, {"reasoning_effort": "high"}, "[high,,,]"),
        (CHAT, {"reasoning_effort": "none"}, "[none,False,False,]"),
        (CHAT, {"reasoning_effort": "none"} | KWARGS, "[none,True,False,1]"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "[low,,,]"),
        (RESPONSES, {"reasoning": {"effort": "none"}}, "[none,False,False,]"),
        (RESPONSES, KWARGS, "[,True,,1]"),
        (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 64}}, "[,True,True,]"),
        (ANTHROPIC, {"thinking": {"type": "disabled"}}, "[,False,False,]"),
        (ANTHROPIC, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "[max,True,True,]"),
        (ANTHROPIC, KWARGS, "[,True,,1]"),
    ],
)
async def test_options_for_reasoning_reach_the_template(place: Place, path: str, field: Any, wanted: str) -> None:
    web = await place.start(REASONED, SWITCH)
    prompt = {"input": "Hi"} if path == RESPONSES else {"messages": MESSAGES, "max_tokens": 100}
    answer = await web.post(path, prompt | field)
    assert answer.status_code == 200, answer.text
    assert wanted in place.prompt()
    if path == ANTHROPIC:
        count = await web.post("/v1/messages/count_tokens", {"messages": MESSAGES} | field)
        assert count.json()["input_tokens"] == len(place.verifier.opens()[-1].prefix.token_ids)
    if path == RESPONSES:
        count = await web.post("/v1/responses/input_tokens", prompt | field)
        assert count.json()["input_tokens"] == len(place.verifier.opens()[-1].prefix.token_ids)
    if path == CHAT:
        count = await web.post("/tokenize", prompt | field)
        assert count.json()["tokens"] == list(place.verifier.opens()[-1].prefix.token_ids)


async def test_a_budget_of_reasoning_reaches_the_verifier(place: Place) -> None:
    """As vLLM and Anthropic name it. A structured output says itself what may stand before it."""
    web = await place.start(REASONED)
    encode = place.setting.tokenizer.token_to_id
    wanted = types_pb2.ReasoningLimit(max_tokens=30, begin_token_id=encode("<think>"), end_token_id=encode("</think>"))
    asked: Any = {"messages": MESSAGES, "max_tokens": 100}
    thinking = {"type": "enabled", "budget_tokens": 30}
    for path, field in ((CHAT, {"thinking_token_budget": 30}), (ANTHROPIC, {"thinking": thinking})):
        assert (await web.post(path, asked | field)).status_code == 200
        assert place.verifier.opens()[-1].reasoning_limit == wanted
    for field in ({}, {"thinking_token_budget": 30, "response_format": {"type": "json_object"}}):
        assert (await web.post(CHAT, asked | field)).status_code == 200
        assert not place.verifier.opens()[-1].HasField("reasoning_limit")
    before = len(place.verifier.opens())
    refused = await web.post(ANTHROPIC, asked | {"thinking": thinking | {"budget_tokens": 100}})
    assert refused.status_code == 400 and "greater than thinking.budget_tokens" in refused.json()["error"]["message"]
    refused = await web.post("/v1/completions", {"prompt": "x", "thinking_token_budget": 5})
    assert refused.json()["error"]["code"] == "field_not_served" and len(place.verifier.opens()) == before


async def test_reasoning_of_earlier_messages_is_passed_to_the_template(place: Place) -> None:
    template = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content }}({{ message.reasoning_content }})")
    web = await place.start(REASONED, template)
    thought = "I add."
    signed = {"type": "thinking", "thinking": thought, "signature": "x"}
    said = [*MESSAGES, {"role": "assistant", "content": [signed, {"type": "text", "text": "4"}]}, *MESSAGES]
    await web.post(ANTHROPIC, {"messages": said, "max_tokens": 5})
    wanted = "<user>How warm?()\n<assistant>4(I add.)\n<user>How warm?()\n<assistant><think>\n"
    assert place.prompt() == wanted
    for name in ("reasoning", "reasoning_content"):
        said = [*MESSAGES, {"role": "assistant", "content": "4", name: thought}, *MESSAGES]
        await web.post(CHAT, {"messages": said, "max_tokens": 5})
        assert place.prompt() == wanted
    item = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
    said = [*MESSAGES, item, {"role": "assistant", "content": [{"type": "output_text", "text": "4"}]}, *MESSAGES]
    await web.post(RESPONSES, {"input": said, "max_output_tokens": 5})
    assert place.prompt() == wanted


async def test_a_structure_follows_reasoning(place: Place) -> None:
    """The grammar begins within the reasoning that the template opens, and not where it is switched off."""
    web = await place.start(REASONED)
    asked = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    await web.post(CHAT, asked)
    grammar = place.verifier.opens()[-1].structured_output.grammar
    assert grammar.startswith("start: TEXT? <[") and "%json" in grammar
    await web.post(CHAT, asked | {"chat_template_kwargs": {"enable_thinking": False}})
    assert place.prompt().endswith("<think></think>") and place.verifier.opens()[-1].structured_output.json_object


async def test_a_prefill_goes_on_within_the_reasoning_that_it_began(place: Place) -> None:
    web = await place.start(REASONED)
    for begun, reasoned in (("<think>Well", True), ("<think>Well</think>So", False)):
        said = [*MESSAGES, {"role": "assistant", "content": begun}]
        made = await web.post(CHAT, {"messages": said, "continue_final_message": True, "add_generation_prompt": False})
        message = made.json()["choices"][0]["message"]
        assert bool(message.get("reasoning")) == reasoned, message


async def test_an_answer_goes_on_within_the_reasoning_of_the_last_message(place: Place) -> None:
    written = "{{ message.content }}({{ message.reasoning_content }})"
    web = await place.start(REASONED, CHAT_TEMPLATE.replace("{{ message.content }}", written))
    said = [*MESSAGES, {"role": "assistant", "content": "", "reasoning": "Well"}]
    asked = {"messages": said, "chat_template_kwargs": {"continue_final_message": "reasoning_content"}}
    message = (await web.post(CHAT, asked)).json()["choices"][0]["message"]
    assert place.prompt().endswith("<assistant>(Well")
    assert message["reasoning"] and message["content"]


async def test_reasoning_is_an_item_of_the_conversation(place: Place) -> None:
    web = await place.start(REASONED, CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message | tojson }}"))
    first = (await web.post(RESPONSES, {"input": "Hi"})).json()
    reasoning, message = first["output"]
    second = (await web.post(RESPONSES, {"input": "More", "previous_response_id": first["id"]})).json()
    prompt = place.prompt()
    listed = (await web.client.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["type"] for item in listed] == ["message", "reasoning", "message", "message"]
    assert listed[1]["content"] == reasoning["content"]
    assert listed[2]["content"][0]["text"] == message["content"][0]["text"]
    for items in ([reasoning, message], listed[1:3]):
        referred = [{"type": "item_reference", "id": item["id"]} for item in items]
        asked = [{"role": "user", "content": "Hi"}, *referred, {"role": "user", "content": "More"}]
        assert (await web.post(RESPONSES, {"input": asked})).status_code == 200
        assert place.prompt() == prompt and json.dumps(reasoning["content"][0]["text"]) in prompt


@pytest.mark.parametrize("per_round", [1, 7, 100])
async def test_log_probabilities_are_those_of_the_text_behind_the_reasoning(place: Place, per_round: int) -> None:
    web = await place.start(REASONED, per_round=per_round)
    place.verifier.mangle = with_logprobs
    asked = {"input": "Hi", "include": ["message.output_text.logprobs"], "stream": True}
    events = [event.json for event in await web.events(RESPONSES, asked)]
    reasoning, message = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": reasoning["content"][0]["text"]}]
    (part,) = message["content"]
    assert part["text"] and "".join(each["token"] for each in part["logprobs"]).startswith(part["text"])
