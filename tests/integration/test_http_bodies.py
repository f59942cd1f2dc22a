"""Bodies of HTTP requests: bounded in values and in memory for all, forgotten once parsed, and what is wrong is named;
names under which a gateway without keys answers to web pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, Response

from gateway.api.http.body import LARGE_BODIES, SMALL_BYTES, BodyLimits, BodyReader, BodyRoute, give_back
from gateway.api.http.entry import local_hosts
from gateway.auth.tenant import Tenant, TenantLimits
from gateway.text.json_body import KEY_BYTES
from gateway.work.frames import JobFrame
from gateway.work.processes import ProcessSource
from gateway.work.tenant_work import TenantWork
from slipstream.client.gateway_endpoint import digest, new_key
from slipstream.errors import PermissionDenied, Unavailable
from tests.support.http_client import CHAT_TEMPLATE, Web, web
from tests.support.scripted_gateway import Setting

LARGE = 10 * SMALL_BYTES
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
SAID = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    setting: Setting, stack: AsyncExitStack
) -> None:
    served = await web(setting, stack, setting.verifier(), max_prompt_bytes=1000)
    for values in ("[],", "1,", "{},"):
        content = b'{"prompt": "x", "max_tokens": 3, "unknown": [' + values.encode() * 1001 + b"0]}"
        answer = await served.client.post("/v1/completions", content=content)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_many_values"
    assert (await served.post("/v1/completions", {"prompt": "," * 900, "max_tokens": 3})).status_code != 413
    for more, refused in ((0, False), (1, True)):
        keys = dict.fromkeys((f"key {number}" for number in range(1000 // KEY_BYTES + more - 2)), 1)
        answer = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 3} | keys)
        assert (answer.status_code == 413) is refused, answer.text
    text = json.dumps(dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 1), separators=(",", ":")) * 6
    assert (await served.post("/v1/completions", {"prompt": text[:1000], "max_tokens": 3})).status_code != 413


class Sender:
    """A client that sends a large body in part, and the rest when it is told to."""

    def __init__(self, size: int) -> None:
        self._messages = [{"type": "http.request", "body": b"x" * size, "more_body": True}, {"type": "http.request"}]
        self.scope: MutableMapping[str, Any] = {"state": {}, "path": "/"}
        self.rest = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        if len(self._messages) == 1:
            await self.rest.wait()
        return self._messages.pop(0)

    def read(self, reader: BodyReader, tenant: str = "") -> asyncio.Task[bytes]:
        return asyncio.create_task(reader.read(self.scope, Tenant(tenant, TenantLimits()), "", self.receive))


async def test_large_bodies_take_a_bounded_memory_and_small_ones_are_read_all_the_same() -> None:
    work = TenantWork(ProcessSource("nothing", lambda: JobFrame({})), processes=1, most_bytes=1)
    reader = BodyReader(BodyLimits(bytes=LARGE, values=1000, idle_s=60), work, lambda *_: LARGE)
    senders = [Sender(LARGE) for _ in range(LARGE_BODIES)]
    reading = [sender.read(reader, f"tenant {index % 2}") for index, sender in enumerate(senders)]
    while reader.held_bytes < LARGE_BODIES * LARGE:
        await asyncio.sleep(0)
    refused, small = Sender(LARGE), Sender(SMALL_BYTES)
    with pytest.raises(Unavailable):
        await refused.read(reader)
    give_back(refused.scope)
    small.rest.set()
    assert len(await small.read(reader)) == SMALL_BYTES
    for sender, task in zip(senders, reading, strict=True):
        sender.rest.set()
        assert len(await task) == LARGE
        give_back(sender.scope)
        give_back(sender.scope)  # once for the route, once for the request
    assert reader.held_bytes == 0


async def test_all_memory_for_bodies_comes_back_whatever_becomes_of_them(
    setting: Setting, stack: AsyncExitStack
) -> None:
    served = await web(setting, stack, setting.verifier(), max_prompt_bytes=10_000)
    long = "x" * (2 * SMALL_BYTES)
    for _ in range(20):  # more in all than the memory for bodies
        assert (await served.client.post("/nothing", content=long)).status_code == 404
        assert (await served.client.post("/tokenize", content=long)).status_code == 400
    assert (await served.post("/tokenize", {"prompt": "x" * 9000})).status_code == 200


async def test_a_request_drops_its_body_while_it_is_answered() -> None:
    left: list[set[str]] = []

    class Watching(Response):
        def __init__(self, request: Request) -> None:
            super().__init__()
            self._request = request

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            left.append({"_body", "_json"} & set(vars(self._request)))
            await super().__call__(scope, receive, send)

    router = APIRouter(route_class=BodyRoute)

    @router.post("/")
    async def answer(asked: dict[str, int], request: Request) -> Response:
        assert asked == {"a": 1} and await request.body()
        return Watching(request)

    app = FastAPI()
    app.include_router(router)

    async def stated(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {}
        await app(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(stated), base_url="http://x") as client:
        assert (await client.post("/", json={"a": 1})).status_code == 200
    assert left == [set()]


async def chatting(setting: Setting, stack: AsyncExitStack, folder: Path) -> Web:
    setting.model.max_length = 1000
    (folder / "chat.jinja").write_text("{# <tool_call> #}" + CHAT_TEMPLATE)
    return await web(setting, stack, setting.verifier(), chat_template=str(folder / "chat.jinja"))


async def test_a_request_nested_too_deeply_is_an_error_of_its_sender(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    served = await chatting(setting, stack, tmp_path)
    function = {"name": "f", "parameters": {"a": DEEP}}
    call = {"type": "tool_use", "name": "f", "input": {"a": DEEP}}
    asked: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": SAID, "chat_template_kwargs": {"a": DEEP}}),
        ("/v1/chat/completions", {"messages": SAID, "tools": [{"type": "function", "function": function}]}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function"} | function]}),
        ("/v1/messages", {"messages": SAID, "tools": [{"name": "f", "input_schema": {"a": DEEP}}], "max_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [call]}], "max_tokens": 3}),
    ]
    for path, body in asked:
        answer = await served.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], (path, answer.text)


async def test_the_fault_of_a_field_of_several_kinds_is_named_by_its_place(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    served = await chatting(setting, stack, tmp_path)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    wrong: list[tuple[str, Any, str]] = [
        (
            "/v1/chat/completions",
            {"messages": image},
            "messages.0.content.0.type: Input should be 'text' or 'refusal'.",
        ),
        ("/v1/completions", {"prompt": [[1], [-1]]}, "prompt.1.0: Input should be greater than or equal to 0."),
        ("/v1/completions", {"prompt": "x", "stop": [1]}, "stop.0: Input should be a valid string."),
    ]
    for path, body, message in wrong:
        assert (await served.post(path, body)).json()["error"]["message"] == message


async def test_the_place_where_a_body_ends_to_be_json_is_named(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    served = await chatting(setting, stack, tmp_path)
    headers = {"content-type": "application/json"}
    answer = await served.client.post("/v1/completions", content=b'{"prompt":"x",', headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] is None
    assert error["message"].startswith("The body is no JSON, from its character 14 on: Expecting property name")


async def test_developer_messages_become_system_messages_for_a_template_without_that_role(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    served = await chatting(setting, stack, tmp_path)
    tokens = [
        (await served.post("/tokenize", {"messages": [{"role": role, "content": "Be brief."}]})).json()["tokens"]
        for role in ("developer", "system", "user")
    ]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    ("listen", "origins", "host", "answered"),
    [
        ("127.0.0.1:8000", (), "127.0.0.1:8000", True),
        ("127.0.0.1:8000", (), "localhost:8000", True),
        ("127.0.0.1:8000", (), "app.localhost", True),
        ("127.0.0.1:8000", (), "gateway:8000", True),
        ("127.0.0.1:8000", (), "[::1]:8000", True),
        ("127.0.0.1:8000", (), "", True),
        ("127.0.0.1:8000", (), "page.example:8000", False),
        ("127.0.0.1:8000", (), "PAGE.example.", False),
        ("127.0.0.1:8000", (), "127.0.0.1.page.example", False),
        ("[::1]:8000", (), "page.example", False),
        ("localhost:8000", (), "page.example", False),
        ("127.0.0.1:8000", ("https://page.example",), "page.example", True),
        ("127.0.0.1:8000", ("https://page.example",), "other.example", False),
        ("127.0.0.1:8000", ("*",), "page.example", True),
        ("0.0.0.0:8000", (), "page.example", True),
    ],
)
def test_names_of_a_gateway_that_listens_to_its_own_machine(
    listen: str, origins: tuple[str, ...], host: str, answered: bool
) -> None:
    try:
        hosts = local_hosts(listen, origins)
        if hosts is not None:
            hosts.check(host)
    except PermissionDenied:
        assert not answered
    else:
        assert answered


async def test_a_page_that_calls_itself_local_gets_nothing_without_a_key(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    verifier, key = setting.verifier(), new_key()
    served = await web(setting, stack, verifier)
    page = {"host": "page.example", "origin": "http://page.example"}
    for path in ("/v1/completions", "/health", "/playground"):
        answer = await served.post(path, {"prompt": "x"}, **page)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "host"
    assert not verifier.opens()
    (tmp_path / "keys.toml").write_text(f'alice = {{ sha256 = "{digest(key).hex()}" }}\n')
    guarded = await web(setting, stack, verifier, api_keys=str(tmp_path / "keys.toml"))
    answer = await guarded.post("/v1/completions", {"prompt": "x"}, **page, authorization=f"Bearer {key}")
    assert answer.status_code == 200
