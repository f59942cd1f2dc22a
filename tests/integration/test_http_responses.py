"""OpenAI's Responses over HTTP: created, streamed, read again on another gateway from any event on, cancelled."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import BadRequestError

from gateway.api.openai import responses
from gateway.api.openai.responses import StoredLimits, StoredResponse, read_stored
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.text.answers.formats import AnswerFormat
from gateway.text.chat_messages import MAX_MESSAGES
from gateway.text.worker import inflated
from slipstream.errors import InvalidArgument, NotFound
from slipstream.v1 import verifier_pb2
from tests.support.http_client import CHAT_TEMPLATE, Web, check_speculation, events_of, web, web_of
from tests.support.scripted_gateway import Setting
from tests.support.sdk_clients import openai_client

CALL = '<tool_call>{"name": "weather", "arguments": {"at": "Ärö"}}</tool_call>'
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
TEXT = f"I look — 日本.\n{CALL}\n{CALL}"


class Pair:
    """Two gateways of one store, and OpenAI's client of the first."""

    def __init__(self, setting: Setting, stack: AsyncExitStack, folder: Path) -> None:
        (folder / "chat.jinja").write_text("{# <tool_call> #}" + CHAT_TEMPLATE)
        self._chat = str(folder / "chat.jinja")
        self.setting = setting
        self._stack = stack
        self._backend = MemoryBackend()

    async def start(self, text: str = TEXT, longest: int = 1000, **options: Any) -> tuple[Web, Web]:
        """`longest`: tokens that the model holds."""
        self.setting.model.max_length = longest
        script = [*self.setting.tokenizer.encode(text).ids, self.setting.eos]
        self.verifier = self.setting.verifier(script, **options)
        stores = [MemoryStore(self._backend, owner=owner, ttl_s=60, lease_s=60) for owner in ("first", "second")]
        first = await web(self.setting, self._stack, self.verifier, store=stores[0], chat_template=self._chat)
        beside = await self.setting.beside(first.front, stores[1], http="127.0.0.1:0", chat_template=self._chat)
        client = openai_client(first.url)
        self.openai = await self._stack.enter_async_context(client)
        return first, await web_of(beside, self._stack)

    def prompt(self) -> str:
        return str(self.setting.tokenizer.decode(list(self.verifier.opens()[-1].prefix.token_ids)))


@pytest.fixture
async def pair(setting: Setting, tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        yield Pair(setting, stack, tmp_path)


async def test_a_response_is_created_and_read_again_anywhere(pair: Pair) -> None:
    _, second = await pair.start("Hello there")
    made = await pair.openai.responses.create(
        model="toy", input="Hi", instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"}
    )
    assert pair.prompt() == "<system>Be brief.\n<user>Hi\n<assistant>"
    assert made.output_text == "Hello there" and made.status == "completed" and made.metadata == {"a": "b"}
    assert made.usage is not None and made.usage.output_tokens == 12 and made.id.startswith("resp_")
    details, extra = made.usage.output_tokens_details.model_extra, made.model_extra
    assert details and extra
    figures = check_speculation(extra["metrics"])
    assert details["accepted_prediction_tokens"] == figures["num_accepted_draft_tokens"] > 0
    assert sum(details[f"{each}_prediction_tokens"] for each in ("accepted", "rejected")) == figures["num_draft_tokens"]
    again = (await second.client.get(f"/v1/responses/{made.id}")).json()
    assert again == json.loads(made.model_dump_json(exclude_unset=True))


async def test_items_of_a_conversation_are_messages_of_the_template(pair: Pair) -> None:
    await pair.start("Hello")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "21"},
    ]
    await pair.openai.responses.create(model="toy", input=items, max_output_tokens=20)
    assert pair.prompt() == "<user>How warm?\n<assistant>\n<tool>21\n<assistant>"


async def test_a_stream_has_the_events_that_the_openai_client_reads(pair: Pair) -> None:
    await pair.start("Hello there", per_round=4)
    async with pair.openai.responses.stream(model="toy", input="Hi", max_output_tokens=50) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello there" and final.status == "completed"
    assert final.model_extra and check_speculation(final.model_extra["metrics"])["num_spec_steps"] == 3
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}


async def test_a_response_that_reaches_its_limit_is_incomplete(pair: Pair) -> None:
    await pair.start("Hello there")
    made = await pair.openai.responses.create(model="toy", input="Hi", max_output_tokens=5)
    assert made.status == "incomplete" and made.output_text == "Hello"
    assert [item.status for item in made.output] == ["incomplete"]
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"


async def test_calls_of_tools_are_items(pair: Pair) -> None:
    await pair.start()
    made = await pair.openai.responses.create(model="toy", input="Hi", tools=TOOLS, max_output_tokens=300)
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    assert made.output_text == "I look — 日本.\n"
    for item in made.output[1:]:
        assert item.type == "function_call" and json.loads(item.arguments) == {"at": "Ärö"} and item.name == "weather"
    assert '"function"' in pair.prompt()


def folded(events: list[Any]) -> list[dict[str, Any]]:
    """The events, with neighbouring deltas of one text joined and without their numbers."""
    made: list[dict[str, Any]] = []
    for event in events:
        data = {name: value for name, value in event.json.items() if name != "sequence_number"}
        if data["type"].endswith(".delta") and made and made[-1]["type"] == data["type"]:
            made[-1]["delta"] += data["delta"]
        else:
            made.append(data)
    return made


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("per_round", [1, 5])
async def test_a_stream_goes_on_behind_every_event_on_another_gateway(pair: Pair, tools: Any, per_round: int) -> None:
    first, second = await pair.start(per_round=per_round)
    asked = {"input": "Hi", "tools": tools, "max_output_tokens": 300, "stream": True}
    whole = await first.events("/v1/responses", asked)
    name = whole[0].json["response"]["id"]
    numbers = [event.json["sequence_number"] for event in whole]
    assert numbers == sorted(set(numbers)) and all(event.name == event.json["type"] for event in whole)
    for index, number in enumerate(numbers):
        after = f"/v1/responses/{name}?stream=true&starting_after={number}"
        async with second.client.stream("GET", after) as response:
            rest = [event async for event in events_of(response)]
        assert folded(whole[: index + 1] + rest) == folded(whole)


async def test_a_running_response_goes_on_where_it_is_read(pair: Pair) -> None:
    first, second = await pair.start("Hello there, you", limit=5, per_round=1)
    asked = {"input": "Hi", "max_output_tokens": 100, "stream": True}
    had = []
    async with first.client.stream("POST", "/v1/responses", json=asked) as reading:
        async for event in events_of(reading):
            had.append(event)
            if event.json["type"].endswith("delta"):
                break
    name, number = had[0].json["response"]["id"], had[-1].json["sequence_number"]
    pair.verifier.limit = None
    async with second.client.stream("GET", f"/v1/responses/{name}?stream=true&starting_after={number}") as response:
        rest = [event async for event in events_of(response)]
    joined = folded(had + rest)
    assert "".join(event.get("delta", "") for event in joined) == "Hello there, you"
    assert joined[-1]["response"]["status"] == "completed"


async def test_a_response_in_the_background_goes_on_without_a_client_and_is_cancelled(pair: Pair) -> None:
    first, second = await pair.start("Hello there, you", limit=5, per_round=1)
    made = await pair.openai.responses.create(model="toy", input="Hi", background=True, max_output_tokens=100)
    assert made.status == "in_progress" and made.output == []
    async with asyncio.timeout(60):
        await pair.verifier.until(lambda: any(session.output == 5 for session in pair.verifier.sessions.values()))
    assert (await second.client.get(f"/v1/responses/{made.id}")).json()["status"] == "in_progress"
    cancelled = await pair.openai.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    record = await first.front.record(made.id.removeprefix("resp_"))
    assert record.finish_reason == verifier_pb2.FINISH_REASON_CANCELLED
    assert (await second.client.get(f"/v1/responses/{made.id}")).json()["status"] == "cancelled"


@pytest.mark.parametrize(
    "field",
    [
        {"background": True, "store": False},
        {"n": 2},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "unknown"}},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "nonsense"}}},
        {"metadata": {"a": "x" * 513}},
        {"metadata": {str(number): "x" for number in range(17)}},
    ],
)
async def test_fields_and_values_that_are_not_served_are_refused(pair: Pair, field: Any) -> None:
    first, _ = await pair.start()
    answer = await first.post("/v1/responses", {"input": "Hi"} | field)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert not pair.verifier.opens()


async def test_sessions_that_are_no_responses_are_not_found(pair: Pair) -> None:
    first, _ = await pair.start("Hello")
    answer = await first.front.generate(annotation=b'{"created_at": "now"}')
    for name in ("missing", answer.started.session_id):
        for method, path in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel")):
            found = await first.client.request(method, f"/v1/responses/resp_{name}{path}")
            assert found.status_code == 404, found.text
    assert (await first.client.get("/v1/responses/nonsense")).status_code == 400


async def test_a_conversation_goes_on_from_a_response_on_any_gateway(pair: Pair) -> None:
    first, second = await pair.start("Hello there")
    made = await pair.openai.responses.create(
        model="toy", input="Hi", instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"}
    )
    asked = {"input": "And on Windows?", "previous_response_id": made.id, "max_output_tokens": 5}
    again = await second.post("/v1/responses", asked)
    # The former instructions do not hold any more.
    assert pair.prompt() == "<user>Hi\n<assistant>Hello there\n<user>And on Windows?\n<assistant>"
    assert again.json()["previous_response_id"] == made.id and again.json()["metadata"] == {}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Thanks"}]}]
    third = await first.post("/v1/responses", {"input": items, "previous_response_id": again.json()["id"]})
    assert third.status_code == 200
    expected = "<user>Hi\n<assistant>Hello there\n<user>And on Windows?\n<assistant>Hello\n<user>Thanks\n<assistant>"
    assert pair.prompt() == expected
    read = (await second.client.get(f"/v1/responses/{third.json()['id']}")).json()
    assert read == third.json()


async def test_calls_of_tools_are_part_of_the_conversation(pair: Pair) -> None:
    first, _ = await pair.start()
    made = await pair.openai.responses.create(model="toy", input="Hi", tools=TOOLS, max_output_tokens=300)
    call = next(item for item in made.output if item.type == "function_call")
    assert call.type == "function_call"
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
    again = await first.post("/v1/responses", {"input": result, "previous_response_id": made.id})
    assert again.status_code == 200
    said = f"<user>Hi\n<assistant>{made.output_text}"
    assert pair.prompt().startswith(said) and pair.prompt().endswith("\n<tool>21\n<assistant>")


async def test_only_a_response_that_is_stored_and_ended_can_be_continued(pair: Pair) -> None:
    first, second = await pair.start("Hello there, you", limit=5, per_round=1)
    running = await pair.openai.responses.create(model="toy", input="Hi", background=True, max_output_tokens=100)
    session = await first.front.generate(max_tokens=2)
    unstored = await pair.openai.responses.create(model="toy", input="Hi", store=False, max_output_tokens=3)
    assert (await second.client.get(f"/v1/responses/{unstored.id}")).status_code == 404
    for name in ("resp_missing", "nonsense", f"resp_{session.started.session_id}", unstored.id, "resp_" + "x" * 2000):
        found = await second.post("/v1/responses", {"input": "More", "previous_response_id": name})
        error = found.json()["error"]
        assert found.status_code == 404 and error["param"] == "previous_response_id"
        assert error["code"] == "previous_response_not_found" and error["type"] == "not_found_error"
    going = await second.post("/v1/responses", {"input": "More", "previous_response_id": running.id})
    assert going.status_code == 400 and going.json()["error"]["code"] == "session_running"


HOSTILE: list[Any] = [
    b"",
    b"no zlib",
    zlib.compress(b"[]"),
    zlib.compress(b"[" * 100_000),
    zlib.compress(b" " * (1 << 24) + b"{}"),
    {"messages": "text"},
    {"messages": [1]},
    {"messages": [{"role": [1], "content": {"a": 1}}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": 7}]},
    {"metadata": [1]},
    {"format": "unknown"},
    {"created_at": "now"},
    {"created_at": [1]},
    {"previous_response_id": {"a": 1}},
    {"more": 1},
]


LIMITS = StoredLimits.of(1_000)


def stored(wrong: Any) -> bytes:
    good = {"created_at": 1, "format": "none", "metadata": {}, "messages": []}
    return wrong if isinstance(wrong, bytes) else zlib.compress(json.dumps(good | wrong).encode())


def unpacked(kept: bytes) -> StoredResponse:
    return read_stored(inflated(kept, LIMITS.size), LIMITS)


async def test_an_annotation_written_by_a_grpc_client_is_no_response(pair: Pair) -> None:
    """Not even where it is what a gateway would have written."""
    first, _ = await pair.start("Hello")
    for annotation in map(stored, [{}, *HOSTILE]):
        session = await first.front.generate(annotation=annotation, max_tokens=3)
        name = f"resp_{session.started.session_id}"
        more = await first.post("/v1/responses", {"input": "More", "previous_response_id": name})
        read = await first.client.get(f"/v1/responses/{name}")
        assert more.status_code == read.status_code == 404
        assert (await first.front.record(session.started.session_id)).annotation == annotation


@pytest.mark.parametrize("wrong", HOSTILE, ids=range(len(HOSTILE)))
def test_a_kept_response_that_is_wrong_is_not_found(wrong: Any) -> None:
    try:
        unpacked(stored(wrong))
    except NotFound as error:
        assert error.reason == "NO_RESPONSE"


@pytest.mark.parametrize(
    "large",
    [
        {"messages": [{"role": "x" * (LIMITS.size + 1)}]},
        {"messages": [{"role": [1] * LIMITS.values}]},
        {"messages": [{}] * LIMITS.values},
        zlib.compress(b" " * (1 << 24) + b"{}"),
    ],
    ids=["bytes", "values", "objects", "spaces"],
)
def test_a_stored_conversation_that_inflates_beyond_the_bound_is_never_parsed(
    large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(responses, "json", SimpleNamespace(loads=parsed.append))
    with pytest.raises(NotFound):
        unpacked(stored(large))
    assert not parsed


async def test_no_conversation_is_kept_that_could_not_be_read_again() -> None:
    largest = StoredResponse(1, AnswerFormat(), {}, [{"role": "user", "content": "," * 1_000}] * MAX_MESSAGES)
    for messages, fits in (([{"role": "user", "content": '"' * 1_000}], True), (largest.messages, False)):
        kept = StoredResponse(1, AnswerFormat(), {}, messages)
        if fits:
            assert unpacked(zlib.compress(await kept.written(LIMITS))) == kept
        else:
            with pytest.raises(InvalidArgument) as refused:
                await kept.written(LIMITS)
            assert refused.value.reason == "CONVERSATION_TOO_LONG"


async def test_a_long_conversation_is_kept_in_little_more_than_its_tokens(pair: Pair) -> None:
    first, _ = await pair.start("Hello there", longest=100_000)
    letters = random.Random(7)
    text = "".join(chr(97 + letters.randrange(26)) for _ in range(40_000))
    made = await first.post("/v1/responses", {"input": text, "max_output_tokens": 5})
    assert made.status_code == 200, made.text
    record = await first.front.store.read(made.json()["id"].removeprefix("resp_"))
    assert len(record.params) < 16_384 + 4 * record.prompt_length
    again = await first.post("/v1/responses", {"input": "More", "previous_response_id": made.json()["id"]})
    assert again.status_code == 200 and text in pair.prompt()


async def test_a_conversation_that_is_too_long_is_truncated_at_its_beginning_if_the_request_allows_it(
    pair: Pair,
) -> None:
    await pair.start("Hello there", longest=60)
    asked: Any = {"model": "toy", "input": f"{'Begin. ' * 20}The end.", "max_output_tokens": 12}
    for refused in ({}, {"truncation": "disabled"}, {"truncation": "middle"}):
        with pytest.raises(BadRequestError):
            await pair.openai.responses.create(**asked | refused)
    made = await pair.openai.responses.create(**asked, truncation="auto")
    assert made.output_text == "Hello there" and made.status == "completed" and made.truncation == "auto"
    assert pair.prompt().endswith("Begin. The end.\n<assistant>") and "<user>" not in pair.prompt()
