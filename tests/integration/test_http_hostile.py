"""The HTTP API against clients that are slow, greedy, or not what they seem; keys and limits as over gRPC."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.client.gateway_endpoint import digest, new_key
from tests.support.certificates import Authority
from tests.support.http_client import CHAT_TEMPLATE, Web, events_of, web
from tests.support.scripted_gateway import Setting

ALICE, BOB = new_key(), new_key()
BODY = {"prompt": "Tell me.", "max_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
UNLISTED = [("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/health/x")]
OPEN = {"/health", "/ping", "/ready"}
GENERATING: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "Tell me, please.", "max_tokens": 20}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 20}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 20}),
    ("/v1/messages", CHAT | {"max_tokens": 20}),
]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def keys(folder: Path, **limits: str) -> str:
    file = folder / "keys.toml"
    known = {"alice": ALICE, "bob": BOB}
    lines = [f'{name} = {{ sha256 = "{digest(known[name]).hex()}" {more} }}\n' for name, more in limits.items()]
    file.write_text("".join(lines))
    return str(file)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_a_key_every_route_but_health_is_closed(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    verifier = setting.verifier()
    served = await web(setting, stack, verifier, api_keys=keys(tmp_path, alice=""), failed_keys_per_minute=0)
    listed = (await served.client.get("/openapi.json", headers=bearer(ALICE))).json()["paths"]
    routes = [(method.upper(), path.replace("{name}", "x")) for path, each in listed.items() for method in each]
    assert len(routes) >= 15
    for method, path in [*routes, *UNLISTED]:
        for headers in ({}, bearer(BOB), {"authorization": ALICE}, {"authorization": f"Basic {ALICE}"}):
            answer = await served.client.request(method, path, headers=headers, content=b"{broken")
            if path in {*OPEN, "/"}:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (path, headers)
            assert answer.json()["error"]["type"] == "authentication_error"
    assert listed.keys() >= OPEN and not verifier.commands
    assert (await served.post("/v1/completions", BODY, **bearer(ALICE))).status_code == 200
    assert len(verifier.opens()) == 1


@pytest.mark.parametrize(
    ("limit", "status", "code"),
    [
        ("requests_per_minute = 1", 429, "key_requests"),
        ("tokens_per_minute = 45", 429, "key_tokens"),
        ("prompt_tokens = 2", 400, None),
        ("max_tokens = 7", 400, None),
    ],
)
async def test_limits_of_a_key_hold_on_every_route_that_generates(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path, limit: str, status: int, code: str | None
) -> None:
    setting.model.max_length = 1000
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    template, limits = str(tmp_path / "chat.jinja"), keys(tmp_path, alice=f", {limit}", bob="")
    served = await web(setting, stack, setting.verifier(), api_keys=limits, chat_template=template)
    if status == 429:  # one fits
        path, body = GENERATING[0]
        assert (await served.post(path, body, **bearer(ALICE))).status_code == 200
    for path, body in GENERATING:
        refused = await served.post(path, body, **bearer(ALICE))
        assert refused.status_code == status, refused.text
        assert ("retry-after" in refused.headers) is (status == 429)
        if code and path != "/v1/messages":  # Anthropic's errors have a type and no code
            assert refused.json()["error"]["code"] == code
        assert (await served.post(path, body, **bearer(BOB))).status_code == 200


async def test_a_response_is_continued_by_its_own_tenant_alone(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    setting.model.max_length = 1000
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    served = await web(
        setting,
        stack,
        setting.verifier(),
        api_keys=keys(tmp_path, alice="", bob=""),
        chat_template=str(tmp_path / "chat.jinja"),
    )
    asked = {"input": "Hi", "max_output_tokens": 5}
    made = (await served.post("/v1/responses", asked, **bearer(ALICE))).json()
    more = asked | {"previous_response_id": made["id"]}
    assert (await served.post("/v1/responses", more, **bearer(ALICE))).status_code == 200
    answers = [
        await served.post("/v1/responses", more | {"previous_response_id": name}, **bearer(BOB))
        for name in (made["id"], "resp_never")
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].json() == answers[1].json()  # not even that it is there


async def test_a_session_is_its_tenants_and_a_limit_is_its_own(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    limits = keys(tmp_path, alice=", sessions = 1, operator = true", bob="")
    verifier = setting.verifier(limit=9)
    served = await web(setting, stack, verifier, api_keys=limits)
    long = BODY | {"max_tokens": 100, "stream": True}
    async with served.client.stream(
        "POST", "/v1/completions", json=long, headers=bearer(ALICE) | {"x-event-ids": "true"}
    ) as reading:
        first = await anext(events_of(reading))
        refused = await served.post("/v1/completions", BODY, **bearer(ALICE))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_sessions"
        assert refused.headers["retry-after"] == "1"
        stolen = await served.post("/v1/completions", long, **bearer(BOB), **{"last-event-id": first.id})
        assert stolen.status_code == 404
        assert (await served.client.get("/metrics", headers=bearer(ALICE))).status_code == 200
        assert (await served.client.get("/metrics", headers=bearer(BOB))).status_code == 403
    verifier.limit = None
    assert (await served.post("/v1/completions", BODY, **bearer(BOB))).status_code == 200


async def test_wrong_keys_are_slowed_down(setting: Setting, stack: AsyncExitStack, tmp_path: Path) -> None:
    served = await web(setting, stack, setting.verifier(), api_keys=keys(tmp_path, alice=""), failed_keys_per_minute=2)
    statuses = [(await served.client.get("/v1/models", headers=bearer(BOB))).status_code for _ in range(3)]
    assert statuses == [401, 401, 429]
    assert (await served.client.get("/v1/models", headers=bearer(ALICE))).status_code == 200


async def raw(served: Web, *parts: bytes) -> bytes:
    """What comes back on a connection on which these bytes are sent, until it is closed."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()  # closed, it would wait for a peer that does not read


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def test_a_body_above_the_limit_is_refused_before_it_is_read(setting: Setting, stack: AsyncExitStack) -> None:
    served = await web(setting, stack, setting.verifier(), max_prompt_bytes=1000)
    declared = await raw(served, POST + b"content-length: 99999999\r\n\r\n")
    assert declared.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in declared
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    undeclared = await raw(served, POST + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 20)
    assert undeclared == b"" or undeclared.startswith(b"HTTP/1.1 413 ")


async def test_slow_and_endless_headers_and_slow_bodies_end_the_connection(
    setting: Setting, stack: AsyncExitStack
) -> None:
    served = await web(setting, stack, setting.verifier(), http_idle_s=0.3)
    assert await raw(served) == b""
    assert await raw(served, POST) == b""
    assert await raw(served, b"\r\n") == b""
    assert await raw(served, POST + b"x: " + b"y" * 200_000) == b""
    for _ in range(20):  # headers that a busy machine brings too late end the connection too
        answer = await raw(served, POST + b"content-length: 10\r\n\r\n{")
        if answer:
            break
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_reads_nothing_is_left_and_its_session_freed(
    setting: Setting, stack: AsyncExitStack
) -> None:
    verifier = setting.verifier([65] * 150, per_round=1, limit=140)  # no session ends by itself
    served = await web(setting, stack, verifier, http_idle_s=1.0)
    # The prompt comes back with every chunk: more in all than the buffers of both ends hold.
    body = b'{"prompt": "' + b"x" * 40 + b'", "n": 100, "stream": true, "max_tokens": 150, "return_token_ids": true}'
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(60):
            await verifier.until(lambda: len(verifier.sessions) == 100)
            await verifier.until(lambda: not verifier.sessions)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "stop": "\\udc00"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": 1.5e0}',
        b'{"prompt": "x", "max_tokens": true}',
        b'{"prompt": "x", "seed": 18446744073709551616}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": [4294967296]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [9999]}',
        b'{"prompt": [[]]}',
        b'{"prompt": "\xff"}',
        b'{"prompt": {"a": 1}}',
    ],
)
async def test_bodies_that_are_wrong_are_refused_without_a_trace_of_them(
    setting: Setting, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    served = await web(setting, stack, setting.verifier())
    caplog.clear()
    headers = {"content-type": "application/json"}
    answer = await served.client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


SECRET = "a-very-private-word"
SECRET_CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
PRIVATE: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 5}),
    ("/v1/completions", {"prompt": "x", "stop": {SECRET: SECRET}}),
    ("/v1/chat/completions", SECRET_CHAT),
    (
        "/v1/chat/completions",
        SECRET_CHAT | {"tools": [{"type": "function", "function": {"name": 5, "description": SECRET}}]},
    ),
    ("/v1/messages", SECRET_CHAT),
    ("/v1/responses", {"input": SECRET, "instructions": SECRET, "metadata": {"a": SECRET}, "max_output_tokens": 5}),
    ("/v1/responses", {"input": SECRET, "previous_response_id": SECRET}),
    ("/tokenize", {"prompt": SECRET}),
]


async def test_no_text_of_a_request_is_in_a_log(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting.model.max_length = 1000
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    served = await web(setting, stack, setting.verifier(), chat_template=str(tmp_path / "chat.jinja"))
    with caplog.at_level(logging.DEBUG, "gateway"), caplog.at_level(logging.INFO):
        answers = [await served.post(path, body) for path, body in PRIVATE]
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400, 200, 200, 404, 200]
    assert SECRET not in caplog.text
    assert not any(SECRET in answer.text for answer in answers if answer.status_code >= 400)


async def test_other_origins_are_closed_unless_the_operator_opens_them(setting: Setting, stack: AsyncExitStack) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    closed = await web(setting, stack, setting.verifier())
    assert "access-control-allow-origin" not in (await closed.client.options("/v1/completions", headers=asked)).headers
    opened = await web(setting, stack, setting.verifier(), http_origins=("https://page.example",))
    answer = await opened.client.options("/v1/completions", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    told = await opened.client.get("/health", headers={"origin": "https://page.example"})
    assert "x-request-id" in told.headers["access-control-expose-headers"]
    other = await opened.client.options("/v1/completions", headers=asked | {"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_tls_shows_the_certificates_as_they_are_now(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    first, second = Authority("first"), Authority("second")
    folder = first.issue(tmp_path / "tls", "localhost")
    served = await web(setting, stack, setting.verifier(), tls_folder=str(folder))
    url = served.url.replace("http://127.0.0.1", "https://localhost")

    async def reachable(authority: Authority) -> bool:
        context = ssl.create_default_context(cadata=authority.pem.decode())
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            try:
                return (await client.get(f"{url}/health")).status_code == 200
            except httpx.ConnectError:
                return False

    assert await reachable(first) and not await reachable(second)
    second.issue(folder, "localhost")
    assert await reachable(second) and not await reachable(first)


async def test_a_gateway_that_ends_lets_streams_finish(setting: Setting, folder: Path) -> None:
    verifier = setting.verifier(limit=9)
    async with AsyncExitStack() as stack:
        own = AsyncExitStack()
        ending = Setting(folder, own)
        served = await web(ending, stack, verifier, grace_s=60.0)
        long = BODY | {"max_tokens": 40, "stream": True}
        async with served.client.stream("POST", "/v1/completions", json=long) as reading:
            events = events_of(reading)
            texts = [(await anext(events)).json["choices"][0]["text"]]
            closing = asyncio.create_task(own.aclose())
            await asyncio.sleep(0)
            verifier.limit = None
            async with asyncio.timeout(60):
                rest: list[Any] = [event async for event in events]
            texts += [event.json["choices"][0]["text"] for event in rest[:-1]]
            assert rest[-1].data == "[DONE]"
        await closing
    assert "".join(texts) == setting.tokenizer.decode(verifier.script[:40])
