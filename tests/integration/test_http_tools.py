"""Tools over HTTP: in the prompt by the model's template, and out of its text as calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import CHAT_TEMPLATE, Web, web
from tests.support.scripted_gateway import Setting
from tests.support.sdk_clients import openai_client

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
        client = openai_client(self.web.url)
        self.openai = await self._stack.enter_async_context(client)
        return self.web

    def prompt(self) -> str:
        """The newest one."""
        return str(self._setting.tokenizer.decode(list(self.verifier.opens()[-1].prefix.token_ids)))


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
    content, calls, reasons, pieces = "", {}, [], 0
    async for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            name, arguments = calls.get(call.index, (call.function.name, ""))
            assert (call.id is None) == (call.index in calls)
            calls[call.index] = (name, arguments + (call.function.arguments or ""))
            pieces += 1
    assert content == "I look.\n" and reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert calls == dict.fromkeys(range(2), ("weather", '{"at": "Ärö"}'))
    assert pieces > 20 if per_round == 1 else pieces >= 2  # arguments come as they are written


async def test_a_stream_of_calls_is_continued_behind_any_event(place: Place) -> None:
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
    calls = list[Any]()
    for call in (call for choice in choices for call in choice["delta"].get("tool_calls", ())):
        if "id" in call:
            calls.append(call)
        else:
            assert call["index"] == len(calls) - 1
            arguments = calls[-1]["function"]["arguments"] + call["function"]["arguments"]
            calls[-1] = calls[-1] | {"function": calls[-1]["function"] | {"arguments": arguments}}
    return content, calls, [t for choice in choices for t in choice["token_ids"]], choices[-1]["finish_reason"]


async def test_without_tools_nothing_is_read_as_a_call(place: Place) -> None:
    await place.start()
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        made = await place.web.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 190} | more)
        choice = made.json()["choices"][0]
        assert choice["message"]["content"] == TEXT and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


async def test_a_format_that_is_not_known_is_text_and_can_be_set(place: Place) -> None:
    asked = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 190}
    web = await place.start(template=CHAT_TEMPLATE)
    (choice,) = (await web.post("/v1/chat/completions", asked)).json()["choices"]
    assert choice["message"]["content"] == TEXT and choice["finish_reason"] == "stop"
    web = await place.start(template=CHAT_TEMPLATE, tool_calls="hermes")
    assert (await web.post("/v1/chat/completions", asked)).json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_is_forced_in_json_where_the_format_is_not_known(place: Place) -> None:
    web = await place.start(template=CHAT_TEMPLATE, text='{"name": "weather", "arguments": {"at": "Ärö"}}')
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    (choice,) = (await web.post("/v1/chat/completions", asked)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"at": "Ärö"}'}
    assert '"weather"' in place.verifier.opens()[-1].structured_output.grammar


async def test_a_template_without_tools_is_refused(place: Place) -> None:
    web = await place.start(template="{{ messages[0].content }}")
    refused = await web.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
    assert refused.status_code == 400 and "takes no tools" in refused.json()["error"]["message"]


async def test_a_call_of_no_tool_of_the_request_is_text(place: Place) -> None:
    await place.start()
    other = [{"type": "function", "function": {"name": "wind"}}]
    asked = {"messages": MESSAGES, "tools": other, "max_tokens": 190}
    (choice,) = (await place.web.post("/v1/chat/completions", asked)).json()["choices"]
    assert choice["message"]["content"] == TEXT and choice["finish_reason"] == "stop"
    flat = [{"type": "function", "name": "wind"}]
    answer = await place.web.post("/v1/responses", {"input": "x", "tools": flat, "max_output_tokens": 190})
    assert [item["type"] for item in answer.json()["output"]] == ["message"]


async def test_a_single_call_may_be_asked_for(place: Place) -> None:
    await place.start()
    made = await place.openai.chat.completions.create(
        model="toy", messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False, max_tokens=190
    )
    assert len(made.choices[0].message.tool_calls or ()) == 1
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    asked = {"input": "x", "tools": flat, "parallel_tool_calls": False, "max_output_tokens": 190}
    answer = await place.web.post("/v1/responses", asked)
    assert [item["type"] for item in answer.json()["output"]] == ["message", "function_call"]
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 190}
    answer = await place.web.post("/v1/messages", message)
    assert [block["type"] for block in answer.json()["content"]] == ["text", "tool_use"]


async def test_a_call_that_the_length_cuts_has_what_there_is_of_it(place: Place) -> None:
    web = await place.start(text=CALL)
    made = await web.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 51})
    (choice,) = made.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"at":'}
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    made = await web.post("/v1/messages", {"messages": MESSAGES, "tools": tools, "max_tokens": 51})
    assert (
        made.json()["content"][0]["input"] == {"INVALID_JSON": '{"at":'} and made.json()["stop_reason"] == "max_tokens"
    )


WRITTEN = """{# <tool_call> #}
{%- for message in messages %}{{ message.tool_calls | default([]) | tojson }}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""
"""Writes calls alone, a line for each message, and the tools."""
FLAT: Any = [{"type": "function", **TOOLS[0]["function"]}]


@pytest.mark.parametrize(
    ("most", "stop", "status", "arguments"),
    [(51, None, "incomplete", '{"at":'), (190, "rö", "completed", '{"at": "Ä')],
)
async def test_a_conversation_goes_on_behind_a_call_that_was_cut(
    place: Place, most: int, stop: str | None, status: str, arguments: str
) -> None:
    """In each way that there is: from the stored response, with its items, with references to them, and as a chat."""
    web = await place.start(WRITTEN, CALL)
    asked = {"input": "How warm?", "tools": FLAT, "tool_choice": "required", "max_output_tokens": most, "stop": stop}
    made = (await web.post("/v1/responses", asked)).json()
    (call,) = made["output"]
    assert (made["status"], call["status"], call["arguments"]) == (status, "incomplete", arguments)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    first, wrapped = MESSAGES[0], json.dumps({"INVALID_JSON": arguments}, ensure_ascii=False)
    for ways in (
        {"input": [result], "previous_response_id": made["id"]},
        {"input": [first, call, result]},
        {"input": [first, {"type": "item_reference", "id": call["id"]}, result]},
    ):
        answer = await web.post("/v1/responses", {"max_output_tokens": 1} | ways)
        assert answer.status_code == 200, answer.text
        assert wrapped in place.prompt(), ways
        listed = (await web.client.get(f"/v1/responses/{answer.json()['id']}/input_items?order=asc")).json()["data"]
        assert (listed[1]["arguments"], listed[1]["status"]) == (arguments, "incomplete")
    chat = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": most, "stop": stop}
    message = (await web.post("/v1/chat/completions", chat)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    said = [*MESSAGES, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}]
    answer = await web.post("/v1/chat/completions", {"messages": said, "max_tokens": 1})
    assert answer.status_code == 200 and wrapped in place.prompt(), answer.text


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"a": "\ud800"}', None),
        (r'{"\udc00 a": [1]}', None),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (r'"x"', None),
        ("x", None),
        ("[1, 2]", None),
        ('{"a": NaN}', None),
        ('{"a": [-Infinity]}', None),
        ('{"a": 1e999}', None),
        ('{"a":   1.50}', {"a": 1.5}),
    ],
)
async def test_arguments_may_be_any_text_and_come_back_as_they_were_sent(
    place: Place, arguments: str, read: Any
) -> None:
    web = await place.start(WRITTEN)
    wanted = {"INVALID_JSON": arguments} if read is None else read
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments}
    items: Any = [call, {"type": "function_call_output", "call_id": "c", "output": "1"}]
    first = await web.post("/v1/responses", {"input": items, "max_output_tokens": 2})
    assert first.status_code == 200, first.text
    assert json.loads(place.prompt().splitlines()[0])[0]["function"]["arguments"] == wanted
    listed = (await web.client.get(f"/v1/responses/{first.json()['id']}/input_items?order=asc")).json()["data"]
    assert listed[0]["arguments"] == arguments
    prompt = place.prompt()
    for again in (listed, [{"type": "item_reference", "id": each["id"]} for each in listed]):
        answer = await web.post("/v1/responses", {"input": again, "max_output_tokens": 2})
        assert answer.status_code == 200 and place.prompt() == prompt, answer.text
    on = {"input": "More", "previous_response_id": first.json()["id"], "max_output_tokens": 2}
    answer = await web.post("/v1/responses", on)
    assert answer.status_code == 200 and place.prompt().splitlines()[0] == prompt.splitlines()[0], answer.text
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": arguments}}]}
    answer = await web.post("/v1/chat/completions", {"messages": [called], "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert json.loads(place.prompt())[0]["function"]["arguments"] == wanted


async def test_half_a_character_that_the_model_wrote_stops_no_conversation(place: Place) -> None:
    web = await place.start(WRITTEN, CALL.replace("Ärö", r"\ud800"))
    made = (await web.post("/v1/responses", {"input": "How warm?", "tools": FLAT, "max_output_tokens": 190})).json()
    (call,) = made["output"]
    assert (call["arguments"], call["status"]) == (r'{"at": "\ud800"}', "completed")
    for ways in ({"input": [call]}, {"input": "More", "previous_response_id": made["id"]}):
        answer = await web.post("/v1/responses", {"max_output_tokens": 2} | ways)
        assert answer.status_code == 200, answer.text
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    asked = {"messages": MESSAGES, "tools": tools, "max_tokens": 190}
    content = (await web.post("/v1/messages", asked)).json()["content"]
    assert content[0]["input"] == {"INVALID_JSON": call["arguments"]}
    said = [*MESSAGES, {"role": "assistant", "content": content}]
    answer = await web.post("/v1/messages", asked | {"messages": said, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("depth", [300, 900, 985, 1200, 5000])
async def test_arguments_that_are_nested_deeply_are_answered_or_refused(place: Place, depth: int) -> None:
    web = await place.start(WRITTEN)
    for text in ("", "x" * 3000):  # small and large ones take different ways
        arguments = '{"a":' * depth + json.dumps(text) + "}" * depth
        call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments}
        for path in ("", "/input_tokens"):
            answer = await web.post(f"/v1/responses{path}", {"input": [call]})
            assert answer.status_code in (200, 400), answer.text
            assert answer.status_code == 200 or answer.json()["error"]["param"] in ("input", None), answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": MESSAGES}, "messages"),
        ("responses", {"input": "x"}, "input"),
        ("responses/input_tokens", {"input": "x"}, "input"),
    ],
)
async def test_a_conversation_that_the_template_refuses_is_named_as_the_api_does(
    place: Place, path: str, body: Any, param: str
) -> None:
    web = await place.start(template="{{ raise_exception('no') }}")
    answer = await web.post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "chat_refused", param)


async def test_a_structure_and_tools_go_together_and_a_forced_call_comes_before_it(place: Place) -> None:
    web = await place.start(text=CALL)
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"messages": MESSAGES, "tools": TOOLS, "response_format": wanted, "max_tokens": 190}
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response = {"input": "x", "tools": flat, "text": text, "max_output_tokens": 190}
    for choice in ("auto", "required"):
        made = await web.post("/v1/chat/completions", asked | {"tool_choice": choice})
        assert made.json()["choices"][0]["finish_reason"] == "tool_calls", made.text
        grammar = place.verifier.opens()[-1].structured_output.grammar
        assert ('"warm"' in grammar) == (choice == "auto") and "<tool_call>" in grammar
        made = await web.post("/v1/responses", response | {"tool_choice": choice})
        assert [item["type"] for item in made.json()["output"]] == ["function_call"]
        assert place.verifier.opens()[-1].structured_output.grammar == grammar
    made = await web.post("/v1/chat/completions", asked | {"tools": None})
    assert json.loads(place.verifier.opens()[-1].structured_output.json_schema) == schema


async def test_ids_of_tool_calls_have_the_form_that_the_template_requires(place: Place) -> None:
    ids = "{% if messages | length > 2 %}{{ messages[1].tool_calls[0].id }}|{{ messages[2].tool_call_id }}{% endif %}"
    template = "{# [TOOL_CALLS] #}" + CHAT_TEMPLATE + ids
    web = await place.start(template=template, text='[TOOL_CALLS][{"name": "weather", "arguments": {}}]')
    made = await web.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 190})
    assert made.status_code == 200, made.text
    (call,) = made.json()["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    for id in (call["id"], "call_of_another_server"):
        called = {"role": "assistant", "tool_calls": [call | {"id": id}]}
        said = [*MESSAGES, called, {"role": "tool", "tool_call_id": id, "content": "21"}]
        await web.post("/v1/chat/completions", {"messages": said, "tools": TOOLS, "max_tokens": 5})
        prompt = place._setting.tokenizer.decode(list(place.verifier.opens()[-1].prefix.token_ids))
        first, _, second = prompt.rpartition("<assistant>")[2].partition("|")
        assert first == second and len(first) == 9 and (first == id) == (id == call["id"])


async def test_a_choice_may_allow_some_of_the_tools(place: Place) -> None:
    web = await place.start(text=CALL)
    tools = [*TOOLS, {"type": "function", "function": {"name": "wind", "parameters": {"type": "object"}}}]
    asked = {"messages": MESSAGES, "tools": tools, "max_tokens": 190}
    named = [{"type": "function", "function": {"name": "weather"}}]
    for mode in ("auto", "required"):
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        (made,) = (await web.post("/v1/chat/completions", asked | {"tool_choice": choice})).json()["choices"]
        assert made["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert made["finish_reason"] == "tool_calls"
        opened = place.verifier.opens()[-1]
        assert "wind" not in place._setting.tokenizer.decode(list(opened.prefix.token_ids))
        assert opened.HasField("structured_output") is (mode == "required")
    flat = [{"type": "function", **each["function"]} for each in tools]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    answer = await web.post("/v1/responses", {"input": "How warm?", "tools": flat, "tool_choice": choice})
    assert [item["name"] for item in answer.json()["output"]] == ["weather"]
    assert "wind" not in place.verifier.opens()[-1].structured_output.grammar


FUNCTIONS: Any = [TOOLS[0]["function"]]


async def test_functions_are_tools_and_their_call_is_a_function_call(place: Place) -> None:
    """As OpenAI's API was before it had tools: one call, no id, results by the function's name."""
    web = await place.start()
    made = await place.openai.chat.completions.create(model="toy", messages=MESSAGES, functions=FUNCTIONS)
    choice = made.choices[0]
    assert choice.finish_reason == "function_call" and choice.message.content == "I look.\n"
    assert choice.message.function_call is not None and choice.message.tool_calls is None
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"at": "Ärö"}
    stream = await place.openai.chat.completions.create(
        model="toy", messages=MESSAGES, functions=FUNCTIONS, function_call="auto", stream=True
    )
    name, arguments, reason = "", "", None
    async for chunk in stream:
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        assert not delta.tool_calls
        name += (delta.function_call and delta.function_call.name) or ""
        arguments += (delta.function_call and delta.function_call.arguments) or ""
    assert (name, arguments, reason) == ("weather", '{"at": "Ärö"}', "function_call")
    answered = [*MESSAGES, choice.message, {"role": "function", "name": "weather", "content": "21"}]
    await place.openai.chat.completions.create(model="toy", messages=answered, functions=FUNCTIONS)
    prompt = place._setting.tokenizer.decode(list(place.verifier.opens()[-1].prefix.token_ids))
    assert "<tool>21" in prompt and json.dumps(TOOLS) in prompt
    none = {"messages": MESSAGES, "functions": FUNCTIONS, "function_call": "none"}
    (choice,) = (await web.post("/v1/chat/completions", none)).json()["choices"]
    assert choice["message"]["content"] == TEXT and "function_call" not in choice["message"]


async def test_a_function_that_is_named_is_forced(place: Place) -> None:
    await place.start(text=CALL)
    made = await place.openai.chat.completions.create(
        model="toy", messages=MESSAGES, functions=FUNCTIONS, function_call={"name": "weather"}
    )
    assert made.choices[0].message.function_call is not None and made.choices[0].finish_reason == "stop"
    assert '"weather"' in place.verifier.opens()[-1].structured_output.grammar


@pytest.mark.parametrize(
    "field",
    [
        {"tool_choice": {"type": "function", "function": {"name": "unknown"}}},
        {"tool_choice": {"type": "custom", "name": "weather"}},
        {"tool_choice": "required", "tools": []},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [{"type": "retrieval"}]},
        {"functions": FUNCTIONS},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": TOOLS}}},
        {"function_call": {"name": "weather"}},
        {"functions": FUNCTIONS, "tools": None, "function_call": {"name": "unknown"}},
    ],
)
async def test_tool_options_that_are_not_served_are_refused(place: Place, field: Any) -> None:
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
    assert made.choices[0].finish_reason == "stop"  # as OpenAI has it for a named tool
    made = await place.openai.chat.completions.create(
        model="toy", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=190
    )
    assert made.choices[0].finish_reason == "tool_calls"
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
    assert len(grammars) == 6 and set(grammars) == {grammars[0]} and '"weather"' in grammars[0]
    await web.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"})
    assert not place.verifier.opens()[-1].HasField("structured_output")
