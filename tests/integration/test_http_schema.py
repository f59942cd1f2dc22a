"""Every route of the HTTP API against requests that its own schema makes, right ones and wrong ones; and against whole
requests of which some part is something else, down to the bytes on the connection."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.support.http_client import CHAT_TEMPLATE, web
from tests.support.scripted_gateway import Setting

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
EXAMPLES = 3, pytest.param(8, marks=pytest.mark.slow)
"""Requests of each route."""
BOUNDED = partial(
    settings,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def attack(url: str, document: dict[str, Any], mode: GenerationMode, examples: int) -> Counter[str]:
    """Answers of each route. Raises for an answer that is the server's fault, or that the schema does not know."""
    answers: Counter[str] = Counter()

    def check(case: Any) -> None:
        response = case.call(base_url=url, timeout=60)
        answers[case.operation.path] += 1
        case.validate_response(response, checks=CHECKS)
        assert response.headers["x-request-id"]
        if response.status_code >= 400:
            assert "error" in response.json()

    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        strategy = found.ok().as_strategy(generation_mode=mode)
        with contextlib.suppress(Unsatisfiable):  # nothing can be wrong in a request that has nothing in it
            BOUNDED(max_examples=examples)(given(case=strategy)(check))()
    return answers


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_no_request_inside_the_schema_or_outside_is_the_servers_fault(
    setting: Setting, tmp_path: Path, mode: GenerationMode, examples: int
) -> None:
    (tmp_path / "chat.jinja").write_text("{# <tool_call> #}" + CHAT_TEMPLATE)
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier(), chat_template=str(tmp_path / "chat.jinja"))
        document = (await served.client.get("/openapi.json")).json()
        answers = await asyncio.to_thread(attack, served.url, document, mode, examples)
    posted = {path for path, operations in document["paths"].items() if "post" in operations}
    assert answers and (posted if mode is GenerationMode.NEGATIVE else set(document["paths"])) <= set(answers)


SAID = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "description": "How warm", "parameters": {"type": "object", "properties": {"at": {}}}}
SHARED = {
    "model": "toy",
    "max_tokens": 3,
    "temperature": 0.5,
    "seed": 7,
    "stop": ["x"],
    "logit_bias": {"65": 1.5},
    "allowed_token_ids": [65, 66],
    "stream_options": {"include_usage": True},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "One"}]},
    "speculation": {"drafters": [], "max_draft_tokens": 2, "rounds": True},
    "cache_salt": "s",
}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/completions": SHARED | {"prompt": ["Tell me.", "And me?"], "response_format": {"type": "text"}},
    "/v1/chat/completions": SHARED
    | {"messages": SAID, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto", "stream": True},
    "/v1/responses": SHARED
    | {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [{"type": "function"} | TOOL],
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "stream": True,
    },
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"messages": SAID, "system": "Be brief."},
    "/tokenize": {"messages": SAID, "add_generation_prompt": True},
    "/detokenize": {"tokens": [65, 66]},
}
INSTEAD: list[Any] = [
    *(None, True, "", "x", "\0\r\n\x1b[2J", "\N{PILE OF POO}" * 500, "null", [], {}, [[]], [{}], {"": None}, -1, 0),
    *(0.5, -0.0, 1e308, 2**31, 2**32, 2**64, -(2**63), 10**400, float("nan"), float("inf"), [0] * 5000),
    *({str(n): n for n in range(3000)}, {"type": "function", "function": {}}, [None, 1, "x", {}]),
]
MUTANTS = 40
"""Of each route."""


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside of `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, each in inside for path in [(*at, key), *places(each, (*at, key))]]


def mutant(whole: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The request with one to three of its values left out, moved, doubled or something else."""
    made = copy.deepcopy(whole)
    for _ in range(chance.randint(1, 3)):
        found = places(made)
        if not found:  # nothing is left to change
            break
        *way, last = chance.choice(found)
        inside = made
        for key in way:
            inside = inside[key]
        change = chance.random()
        if change < 0.1:
            del inside[last]
        elif change < 0.2:
            inside[last] = [copy.deepcopy(inside[last])] * 2
        elif change < 0.3:
            inside[last] = copy.deepcopy(made)
        else:
            inside[last] = copy.deepcopy(chance.choice(INSTEAD))
    return made


@pytest.mark.parametrize("path", WHOLE)
async def test_no_mutant_of_a_whole_request_is_the_servers_fault(setting: Setting, tmp_path: Path, path: str) -> None:
    chance, statuses = random.Random(path), Counter[int]()
    setting.model.max_length = 1000
    (tmp_path / "chat.jinja").write_text("{# <tool_call> #}" + CHAT_TEMPLATE)
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier(), chat_template=str(tmp_path / "chat.jinja"))
        url = path + ("?event_ids=true" if "stream" in WHOLE[path] else "")
        assert (await served.post(url, WHOLE[path])).status_code == 200
        for _ in range(MUTANTS):
            asked = mutant(WHOLE[path], chance)
            answer = await served.client.post(
                url, content=json.dumps(asked), headers={"content-type": "application/json"}
            )
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (asked, answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"] and len(answer.content) < 4000, asked
        assert (await served.post(url, WHOLE[path])).status_code == 200
    assert statuses[400] > MUTANTS // 4


async def send_bytes(url: str, sent: bytes) -> bytes:
    """The first bytes of the answer; none where the connection is ended without one."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(60):
            return await reader.read(100)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()  # closed, it would wait for a peer that does not read


async def is_served(url: str, request: bytes) -> bool:
    for _ in range(20):  # a request that a busy machine brings too late has no answer
        if answer := await send_bytes(url, request):
            return answer.startswith(b"HTTP/1.1 200 ")
    return False


async def test_no_bytes_on_a_connection_end_the_gateway(setting: Setting) -> None:
    chance = random.Random(18)
    body = json.dumps(WHOLE["/v1/completions"]).encode()
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: a\r\n"
    whole += b"content-length: %d\r\n\r\n" % len(body) + body
    async with AsyncExitStack() as stack:
        served = await web(setting, stack, setting.verifier(), http_idle_s=0.5)
        send = partial(send_bytes, served.url)
        assert await is_served(served.url, whole)
        garbled = []
        for _ in range(200):
            sent = bytearray(whole)
            for _ in range(chance.choice((1, 1, 2, 20))):
                sent[chance.randrange(len(sent))] = chance.randrange(256)
            cut = chance.randrange(len(sent)) if chance.random() < 0.2 else len(sent)
            garbled.append(bytes(sent[:cut]))
        for begin in range(0, len(garbled), 20):
            for answer in await asyncio.gather(*map(send, garbled[begin : begin + 20])):
                assert answer == b"" or answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), answer[:200]
        assert await is_served(served.url, whole)
