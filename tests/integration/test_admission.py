"""Work on a request before it is admitted: the cheapest checks first, each text once, and none of it on the event loop
where it is long."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import starlette.requests

from gateway.api.http.body import SMALL_BYTES
from gateway.auth.tenant import Tenant
from gateway.text.encoding import TextEncoding
from gateway.work.frames import JobFrame
from gateway.work.tenant_work import TenantWork
from slipstream.client.gateway_endpoint import digest, new_key
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2
from tests.support.fleet import until
from tests.support.http_client import CHAT_TEMPLATE, Web, web
from tests.support.scripted_gateway import Setting

KEY = new_key()
BEARER = {"authorization": f"Bearer {KEY}"}
LENGTH = 6_000
LONG = "a text that is too long for the event loop, " * 60
HUGE = LONG * 15
"""More bytes than LENGTH tokens of five bytes have, and less than a prompt may have."""
SAID = [{"role": "user", "content": LONG}]


class Jobs:
    """What was encoded, by kind, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beside: Counter[str] = Counter()
        """In processes."""
        self.here: Counter[str] = Counter()
        """On the event loop, of texts that are long."""
        run, encode, chat = TenantWork.run, TextEncoding.encode, TextEncoding.encode_chat

        async def running(work: TenantWork, tenant: Tenant, kind: str, body: Any, **options: Any) -> JobFrame:
            self.beside[kind] += 1
            return await run(work, tenant, kind, body, **options)

        def encoding(this: TextEncoding, text: str, kind: str = "whole") -> list[int]:
            self.here["encode"] += len(text) > 4096
            return encode(this, text, kind)

        def rendering(this: TextEncoding, messages: Any, *more: Any) -> list[int]:
            self.here["chat"] += len(json.dumps(messages)) > 4096
            return chat(this, messages, *more)

        monkeypatch.setattr(TenantWork, "run", running)
        monkeypatch.setattr(TextEncoding, "encode", encoding)
        monkeypatch.setattr(TextEncoding, "encode_chat", rendering)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(monkeypatch)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def serving(setting: Setting, stack: AsyncExitStack, folder: Path, limits: str = "") -> Web:
    setting.model.max_length = LENGTH
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    (folder / "keys.toml").write_text(f'alice = {{ sha256 = "{digest(KEY).hex()}"{limits} }}\n')
    files = {"chat_template": str(folder / "chat.jinja"), "api_keys": str(folder / "keys.toml")}
    return await web(setting, stack, setting.verifier(), **files)


PROMPT: dict[str, Any] = {"prompt": LONG, "max_tokens": 2}
PREDICTED: dict[str, Any] = {"prediction": {"content": LONG}}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", PROMPT | PREDICTED | {"n": 5}, {"encode": 2}),
        ("/v1/completions", PROMPT | {"prompt": [LONG, LONG + "!"], "n": 3, "echo": True}, {"encode": 2}),
        ("/v1/completions", PROMPT | {"prompt": [[5] * 600], "n": 4, "echo": True}, {"decode": 1}),
        ("/v1/chat/completions", {"messages": SAID, "n": 5, "max_tokens": 2} | PREDICTED, {"chat": 1, "encode": 1}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 2, "store": False}, {"chat": 1}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 2}, {"chat": 1}),
        ("/v1/messages/count_tokens", {"messages": SAID}, {"chat": 1}),
        ("/tokenize", {"prompt": LONG}, {"encode": 1}),
        ("/tokenize", {"messages": SAID, "return_token_strs": True}, {"chat": 1}),
        ("/detokenize", {"tokens": [5] * 600}, {"decode": 1}),
    ],
)
async def test_a_long_text_is_read_once_and_not_on_the_event_loop(
    path: str, body: Any, expected: Any, setting: Setting, stack: AsyncExitStack, tmp_path: Path, jobs: Jobs
) -> None:
    served = await serving(setting, stack, tmp_path)
    answer = await served.post(path, body, **BEARER)
    assert answer.status_code == 200, answer.text
    assert jobs.beside == expected and not jobs.here.total()


OPENAI_CODES = {"prompt_too_long": "context_length_exceeded"}


@pytest.mark.parametrize(
    ("limits", "changes", "code"),
    [
        ("", {"prompt": HUGE}, "prompt_too_long"),
        ("", {"prediction": {"content": HUGE}}, "prediction_too_long"),
        (", prompt_tokens = 100", {}, "key_prompt"),
        (", sessions = 2", {"n": 3}, "key_sessions"),
        (", tokens_per_minute = 500", {}, "key_tokens"),
        (", max_tokens = 1", {}, "key_output"),
        ("", {"model": "another"}, "no_model"),
        ("", {"temperature": -1.0}, "number_out_of_range"),
        ("", {"stop": ["x" * 2000]}, "stop_string"),
        ("", {"priority": -5}, "priority"),
    ],
)
async def test_cheap_checks_refuse_a_request_before_its_text_is_read(
    limits: str, changes: Any, code: str, setting: Setting, stack: AsyncExitStack, tmp_path: Path, jobs: Jobs
) -> None:
    served = await serving(setting, stack, tmp_path, limits)
    answer = await served.post("/v1/completions", PROMPT | changes, **BEARER)
    assert answer.json()["error"]["code"] == OPENAI_CODES.get(code, code), answer.text
    asked = {name: value for name, value in changes.items() if name in ("model", "priority", "stop", "prompt")}
    if "prediction" in changes:
        asked["prediction"] = gateway_pb2.Prediction(text=HUGE)
    if "n" not in changes and "temperature" not in changes:
        request = gateway_pb2.GenerateRequest(**{"prompt": LONG, "max_tokens": 2} | asked)
        call = served.front.stub.Generate(request, metadata=tuple(BEARER.items()))
        with pytest.raises(grpc.RpcError) as refused:
            async for _ in call:
                pass
        assert error_of(refused.value).reason == code.upper()
    assert not jobs.beside and not jobs.here.total()


async def test_conversations_that_are_refused_for_nothing_are_not_rendered(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path, jobs: Jobs
) -> None:
    served = await serving(setting, stack, tmp_path, ", sessions = 2")
    for path, body in (
        ("/v1/chat/completions", {"messages": SAID, "n": 3}),
        ("/v1/chat/completions", {"messages": SAID, "max_tokens": 2, "temperature": -1.0}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 2, "temperature": -1.0}),
        ("/v1/responses", {"input": LONG, "temperature": -1.0}),
    ):
        assert (await served.post(path, body, **BEARER)).status_code in (400, 429)
    assert not jobs.beside and not jobs.here.total()


async def test_large_bodies_are_parsed_beside_the_event_loop_and_mean_the_same(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serving(setting, stack, tmp_path)
    sizes: list[int] = []
    loads = starlette.requests.json.loads

    def noting(text: Any, *more: Any, **named: Any) -> Any:
        sizes.append(len(text))
        return loads(text, *more, **named)

    monkeypatch.setattr(starlette.requests.json, "loads", noting)
    headers = BEARER | {"content-type": "application/json"}
    escaped = b'{"prompt": "' + b"\\u0041" * 20_000 + b'", "add_special_tokens": false}'
    many = json.dumps({"tokens": [65] * 40_000}).encode()
    ids = json.dumps({"prompt": [[66] * 40_000, [67] * 40_000], "max_tokens": 2}).encode()
    asked = [("/tokenize", escaped), ("/detokenize", many), ("/v1/completions", ids), ("/tokenize", escaped[:-1])]
    answers = [await served.client.post(path, content=body, headers=headers) for path, body in asked]
    monkeypatch.undo()
    assert all(len(body) > SMALL_BYTES for _, body in asked) and max(sizes) < SMALL_BYTES
    split, joined, refused, wrong = [answer.json() for answer in answers]
    assert split["tokens"] == [setting.tokenizer.token_to_id("A")] * 20_000
    assert joined["prompt"] == setting.tokenizer.decode([65] * 40_000)
    assert refused["error"]["code"] == "context_length_exceeded"
    assert wrong["error"]["message"].startswith(f"The body is no JSON, from its character {len(escaped) - 1} on")


async def test_a_body_is_no_larger_than_texts_that_the_key_may_send_need(
    setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    served = await serving(setting, stack, tmp_path, ", prompt_tokens = 10")
    content = b'{"prompt": "' + b"\\u0041" * 190_000 + b'"}'
    headers = BEARER | {"content-type": "application/json"}
    refused = await served.client.post("/v1/completions", content=content, headers=headers)
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "body_too_large"
    counted = await served.client.post("/tokenize", content=content, headers=headers)
    assert counted.status_code == 200


async def test_texts_to_count_are_charged(setting: Setting, stack: AsyncExitStack, tmp_path: Path) -> None:
    served = await serving(setting, stack, tmp_path, ", tokens_per_minute = 100")
    statuses = [(await served.post("/tokenize", {"prompt": LONG}, **BEARER)).status_code for _ in range(12)]
    assert statuses[0] == 200 and statuses[-1] == 429, statuses


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/completions", "/v1/chat/completions"])
async def test_work_ends_when_its_client_leaves(
    path: str, setting: Setting, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """What waits and what is being done, whatever route it is for."""
    served = await serving(setting, stack, tmp_path)
    work, huge = served.front.gateway.work, [{"role": "user", "content": "many words, " * 8_000}]
    body = {"messages": huge} if path != "/v1/completions" else {"prompt": "x", "prediction": {"content": LONG * 10}}
    assert (await served.post("/tokenize", {"prompt": LONG}, **BEARER)).status_code == 200
    for process in work._idle:
        os.kill(process.pid, signal.SIGSTOP)  # takes a job, and never ends it
    sent = [asyncio.create_task(served.post(path, body | {"max_tokens": 2}, **BEARER)) for _ in range(4)]
    await until(lambda: work.waiting.total() == 3)
    for task in sent:
        task.cancel()
    await asyncio.wait(sent)
    await until(lambda: not work.waiting.total() and not work._serving)
    assert sum(work.failures.values()) == 1
    assert (await served.post("/tokenize", {"prompt": LONG}, **BEARER)).status_code == 200
