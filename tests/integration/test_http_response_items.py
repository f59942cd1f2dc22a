"""A response's items: referred to, listed, counted, with log-probabilities, shown while they are written, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.test_http_responses import TOOLS, Pair
from tests.support.scripted_gateway import Setting, with_logprobs


@pytest.fixture
async def pair(setting: Setting, tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        yield Pair(setting, stack, tmp_path)


async def test_items_of_earlier_responses_are_referred_to_on_any_gateway(pair: Pair) -> None:
    _, second = await pair.start("Hello there")
    made = await pair.openai.responses.create(model="toy", input="Hi", max_output_tokens=50)
    listed = (await second.client.get(f"/v1/responses/{made.id}/input_items")).json()["data"]
    for alone in (False, True):  # the type is optional
        items = [listed[0]["id"], made.output[0].id]
        refer = [{"id": each} if alone else {"type": "item_reference", "id": each} for each in items]
        answer = await second.post("/v1/responses", {"input": [*refer, {"role": "user", "content": "Again"}]})
        assert answer.status_code == 200, answer.text
        assert pair.prompt() == "<user>Hi\n<assistant>Hello there\n<user>Again\n<assistant>"


@pytest.mark.parametrize("id", ["item_0123abcd_0", "rs_unknown", ""])
async def test_an_item_that_is_not_there_is_named(pair: Pair, id: str) -> None:
    first, _ = await pair.start("Hello")
    answer = await first.post("/v1/responses", {"input": [{"type": "item_reference", "id": id}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "no_item", "input") and repr(id) in error[
        "message"
    ]


async def test_a_request_refers_to_items_of_few_responses(pair: Pair) -> None:
    first, _ = await pair.start("Hello")
    refer = [{"type": "item_reference", "id": f"item_{number:x}_0"} for number in range(17)]
    answer = await first.post("/v1/responses", {"input": refer})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_items")


async def test_the_output_of_a_tool_may_be_a_list_of_parts(pair: Pair) -> None:
    await pair.start("Hello")
    output = [{"type": "input_text", "text": "21"}, {"type": "input_text", "text": "sunny"}]
    items: Any = [
        {"role": "user", "content": "How warm?"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    await pair.openai.responses.create(model="toy", input=items, max_output_tokens=20)
    assert pair.prompt() == "<user>How warm?\n<assistant>\n<tool>21\nsunny\n<assistant>"


async def test_input_items_are_listed_in_pages(pair: Pair) -> None:
    await pair.start("Hello")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"at": "Ulm"}'},
        {"type": "function_call_output", "call_id": "c", "output": "21"},
    ]
    made = await pair.openai.responses.create(model="toy", input=items, max_output_tokens=20)
    found = [item async for item in pair.openai.responses.input_items.list(made.id, limit=1, order="asc")]
    assert [item.type for item in found] == ["message", "function_call", "function_call_output"]
    message, call, output = found
    assert message.type == "message" and message.content[0].type == "input_text"
    assert message.content[0].text == "How warm?"
    assert call.type == "function_call" and (call.call_id, call.arguments) == ("c", '{"at": "Ulm"}')
    assert output.type == "function_call_output" and (output.call_id, output.output) == ("c", "21")
    newest = await pair.openai.responses.input_items.list(made.id)
    assert [item.id for item in newest.data] == [item.id for item in reversed(found)] and not newest.has_more
    with pytest.raises(openai.NotFoundError):
        await pair.openai.responses.input_items.list(made.id, after="nothing")


async def test_input_tokens_are_those_that_the_response_has(pair: Pair) -> None:
    await pair.start("Hello")
    asked: Any = {"model": "toy", "input": "Hi", "instructions": "Be brief.", "tools": TOOLS}
    counted = await pair.openai.responses.input_tokens.count(**asked)
    made = await pair.openai.responses.create(**asked, max_output_tokens=20)
    assert counted.object == "response.input_tokens" and made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens > 20


async def test_a_response_gives_back_what_was_sent(pair: Pair) -> None:
    first, second = await pair.start("Hello")
    sent: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [TOOLS[0] | {"strict": False, "description": "How warm it is."}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
        "user": "u",
    }
    made = (await first.post("/v1/responses", {"input": "Hi"} | sent)).json()
    assert {name: made[name] for name in sent} == sent
    assert (await second.client.get(f"/v1/responses/{made['id']}")).json() == made


async def test_logprobs_come_with_the_text_they_belong_to(pair: Pair) -> None:
    first, _ = await pair.start("Hello there", per_round=4)
    plain = await pair.openai.responses.create(model="toy", input="Hi", max_output_tokens=50)
    assert plain.output[0].type == "message" and plain.output[0].content[0].type == "output_text"
    assert not plain.output[0].content[0].logprobs
    pair.verifier.mangle = with_logprobs
    include: Any = ["message.output_text.logprobs"]
    made = await pair.openai.responses.create(
        model="toy", input="Hi", include=include, top_logprobs=2, max_output_tokens=50
    )
    part = made.output[0]
    assert part.type == "message" and part.content[0].type == "output_text" and part.content[0].logprobs
    told = part.content[0].logprobs
    assert "".join(each.token for each in told).startswith("Hello there")
    assert all(len(each.top_logprobs) == 2 for each in told)
    asked = {"input": "Hi", "include": include, "top_logprobs": 2, "max_output_tokens": 50, "stream": True}
    events = [event.json for event in await first.events("/v1/responses", asked)]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed = [each for event in deltas for each in event["logprobs"]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    whole = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in whole] == [each.token for each in told]
    assert done["logprobs"] == whole and streamed == whole[: len(streamed)] and len(streamed) >= len(whole) - 1
    said = ["".join(each["token"] for each in event["logprobs"]) for event in deltas]  # the last one the text's end too
    assert all(text.startswith(event["delta"]) for text, event in zip(said, deltas, strict=True))


async def test_a_running_response_shows_its_output(pair: Pair) -> None:
    first, second = await pair.start("Hello there, you", limit=5, per_round=1)
    made = await pair.openai.responses.create(model="toy", input="Hi", background=True, max_output_tokens=100)
    async with asyncio.timeout(60):
        await pair.verifier.until(lambda: any(session.output == 5 for session in pair.verifier.sessions.values()))
    for gateway in (first, second):
        async with asyncio.timeout(60):
            while (read := (await gateway.client.get(f"/v1/responses/{made.id}")).json())["output"] == []:
                await asyncio.sleep(0.05)
        (message,) = read["output"]
        assert read["status"] == message["status"] == "in_progress" and read["usage"] is None
        assert "Hello there, you".startswith(message["content"][0]["text"]) and message["content"][0]["text"]
    cancelled = await pair.openai.responses.cancel(made.id)
    assert cancelled.status == "cancelled" and cancelled.output_text == "Hello" and cancelled.usage is not None
    assert cancelled.background is True and cancelled.usage.output_tokens == 5


async def test_a_deleted_response_is_gone_on_every_gateway(pair: Pair) -> None:
    first, second = await pair.start("Hello there, you", limit=5, per_round=1)
    made = await pair.openai.responses.create(model="toy", input="Hi", background=True, max_output_tokens=100)
    await pair.openai.responses.delete(made.id)
    for gateway in (first, second):
        assert (await gateway.client.get(f"/v1/responses/{made.id}")).status_code == 404
    async with asyncio.timeout(60):
        await pair.verifier.until(lambda: not pair.verifier.sessions)
    with pytest.raises(openai.NotFoundError):
        await pair.openai.responses.delete(made.id)
