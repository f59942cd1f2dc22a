"""Attacks of one API key, by name: what is sent to a route or RPC, and how often at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.v1 import gateway_pb2
from tests.isolation.scribe import CHARACTERS, SCRIBE

MB = 1_000_000
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
IDLE_ORIGIN = "127.0.0.2"
_numbers = count()

MORE_WORDS = " and many more words"
OUTPUT = 100
"""Tokens of a session that is resumed and branched."""
OUR_FAULT = ("500", "INTERNAL", "UNKNOWN")
"""Beginnings of codes that no attack may get."""
Body = dict[str, Any]


@dataclass
class Attacker:
    """Key A's clients of one gateway."""

    http: httpx.AsyncClient
    rpc: grpc.aio.Channel
    stub: Any
    address: tuple[str, int]
    """Of the HTTP listener."""
    model: str = ""
    """Of which texts are asked where any model will do; empty: the only one."""
    most_prompt: int = 1000
    """Tokens of the longest prompt that the key and the model take."""
    text_bytes: int = MB
    """Of what is longer than any prompt."""
    sessions: list[str] = field(default_factory=list)
    """Names of sessions that it has."""
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)


Send = Callable[[Attacker, str], Awaitable[str]]
"""Sends one request to a route or RPC. Returns its error's code; empty for an answer."""


@dataclass(frozen=True)
class Attack:
    send: Send
    at_once: int
    """Requests at a time."""


@contextlib.asynccontextmanager
async def under_way(attack: Attack, attacker: Attacker, target: str) -> AsyncIterator[list[str]]:
    """The attack for as long as the block runs; codes of what has ended so far. The first answer, or a second, is
    waited for."""
    outcomes: list[str] = []
    first = asyncio.Event()

    async def repeat() -> None:
        while True:
            try:
                outcomes.append(await attack.send(attacker, target))
            except grpc.RpcError as error:  # in what goes before the attack
                outcomes.append(str(error.code().name))
            first.set()
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(repeat()) for _ in range(attack.at_once)]
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(first.wait(), 1.0)
        for task in tasks:
            if task.done():  # what the attack raised: nobody would wait for its outcomes
                task.result()
        yield outcomes
        failed = [task for task in tasks if task.done()]
        for task in failed:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def text_of(target: str, text: str, most: int, stream: bool = False) -> Body:
    """The body of a route that takes a text, with at most so many tokens behind it."""
    said = [{"role": "user", "content": text}]
    bodies: dict[str, Body] = {
        "POST /v1/completions": {"prompt": text, "max_tokens": most, "stream": stream},
        "POST /v1/chat/completions": {"messages": said, "max_tokens": most, "stream": stream},
        "POST /v1/responses": {"input": text, "max_output_tokens": most, "stream": stream},
        "POST /v1/responses/input_tokens": {"input": text},
        "POST /v1/messages": {"messages": said, "max_tokens": most, "stream": stream},
        "POST /v1/messages/count_tokens": {"messages": said},
        "POST /tokenize": {"prompt": text},
        "POST /detokenize": {"tokens": list(range(100))},
    }
    return bodies[target]


async def post(attacker: Attacker, target: str, content: bytes) -> str:
    """The gateway may close the connection before it has read everything: that is "closed"."""
    path = target.split()[1]
    headers = {"content-type": "application/json", "x-api-key": attacker.http.headers["authorization"][7:]}
    try:
        async with attacker.http.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code == 200:
                async for _ in response.aiter_raw():
                    pass
                return ""
            error = json.loads(await response.aread()).get("error", {})
            return f"{response.status_code} {error.get('code') or error.get('type')}"
    except httpx.TransportError:
        return "closed"


async def call(answer: Any) -> str:
    """The code of an RPC's error."""
    try:
        if hasattr(answer, "__aiter__"):
            async for _ in answer:
                pass
        else:
            await answer
        return ""
    except grpc.RpcError as error:
        return str(error.code().name)


def long(size: int) -> str:
    """A text of so many bytes."""
    words = "Nobody knows, so many words. "
    return words * (size // len(words))


def _is_rpc(target: str) -> bool:
    return " " not in target


@cache
def _content(kind: str, target: str, model: str, size: int) -> bytes:
    """Bodies that are the same each time: making one takes longer than refusing it."""
    body = text_of(target, "x", 1)
    if "tokenize" not in target and "count" not in target:
        body["model"] = model
    if kind == "escapes":
        head = json.dumps(body)[:-1].encode()
        return head + b', "more": "' + b"\\u0041" * (12 * MB // 6) + b'"}'
    if kind == "values":
        return json.dumps(body | {"more": [1] * MB}).encode()
    if kind == "long text":
        return json.dumps(text_of(target, long(size), 10 * MB) | ({"model": model} if "model" in body else {})).encode()
    if kind == "predictions":
        return json.dumps(body | {"n": 128, "prediction": {"type": "content", "content": long(size)}}).encode()
    if kind == "messages":
        said = [{"role": "user", "content": f"m {number}{MORE_WORDS}"} for number in range(10_000)]
        body = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
        return json.dumps(body | {"messages": said}).encode()
    assert kind == "token ids"
    return json.dumps({"tokens": list(range(256)) * 2000}).encode()


def _fixed(kind: str) -> Send:
    async def send(attacker: Attacker, target: str) -> str:
        return await post(attacker, target, _content(kind, target, attacker.model, attacker.text_bytes))

    return send


async def long_text(attacker: Attacker, target: str) -> str:
    if _is_rpc(target):
        return await call(
            attacker.stub.Tokenize(gateway_pb2.TokenizeRequest(text=long(attacker.text_bytes), model=attacker.model))
        )
    return await _fixed("long text")(attacker, target)


async def messages(attacker: Attacker, target: str) -> str:
    if not _is_rpc(target):
        return await _fixed("messages")(attacker, target)
    chat = gateway_pb2.Chat(messages=[_message(f"m {number}{MORE_WORDS}") for number in range(10_000)])
    return await call(
        attacker.stub.Generate(gateway_pb2.GenerateRequest(chat=chat, max_tokens=1, model=attacker.model))
    )


def _message(text: str) -> Any:
    return gateway_pb2.ChatMessage(role="user", content=text)


async def unknown_fields(attacker: Attacker, target: str) -> str:
    names = {f"unknown_{next(_numbers)}": 1 for _ in range(100)}
    return await post(attacker, target, json.dumps(text_of(target, "x", 1) | names).encode())


async def generate(attacker: Attacker, target: str, words: int, most: int, **more: Any) -> str:
    """A text of its own behind a prompt of about so many tokens."""
    text = f"{next(_numbers)}: " + "x = 1\n" * (words // 4)
    if _is_rpc(target):
        asked = gateway_pb2.GenerateRequest(prompt=text, max_tokens=most, ignore_eos=True, model=attacker.model, **more)
        return await call(attacker.stub.Generate(asked))
    body = text_of(target, text, max(most, 16) if "responses" in target else most, stream=True)
    return await post(attacker, target, json.dumps(body | {"model": attacker.model}).encode())


async def long_prompts(attacker: Attacker, target: str) -> str:
    return await generate(attacker, target, attacker.most_prompt * 3 // 4, 1)


async def long_texts(attacker: Attacker, target: str) -> str:
    return await generate(attacker, target, 8, 500)


async def short_texts(attacker: Attacker, target: str) -> str:
    more = {"annotation": bytes(16_000)} if _is_rpc(target) else {}
    return await generate(attacker, target, 8, 1, **more)


async def unread(attacker: Attacker, target: str) -> str:
    """A stream that its client holds and never reads."""
    if _is_rpc(target):
        asked = gateway_pb2.GenerateRequest(prompt="x", max_tokens=500, ignore_eos=True, model=attacker.model)
        answer = attacker.stub.Generate(asked)
        try:
            await asyncio.sleep(0.5)
        finally:
            answer.cancel()
        return "cancelled"
    body = json.dumps(text_of(target, "x", 500, stream=True) | {"model": attacker.model}).encode()
    headers = {"content-type": "application/json"}
    async with attacker.http.stream("POST", target.split()[1], content=body, headers=headers) as response:
        await asyncio.sleep(0.5)
        return "" if response.status_code == 200 else str(response.status_code)


async def tool_calls(attacker: Attacker, target: str) -> str:
    body = text_of(target, "Look.", CHARACTERS // 2, stream=True) | {"model": SCRIBE, "tools": TOOLS}
    return await post(attacker, target, json.dumps(body).encode())


async def inflating(attacker: Attacker, target: str) -> str:
    """Of a session of gRPC, which wrote what a response would have kept; then the response that goes on with it."""
    if not attacker.sessions:
        kept = {"created": 1, "metadata": {}, "messages": [{"role": "user", "content": "x" * 100}] * 120_000}
        annotation = zlib.compress(json.dumps(kept).encode(), 9)[:16_000]
        asked = gateway_pb2.GenerateRequest(prompt="x", max_tokens=1, annotation=annotation, model=attacker.model)
        async for event in attacker.stub.Generate(asked):
            if event.HasField("started"):
                attacker.sessions.append(event.started.session_id)
    body = text_of(target, "x", 16) | {"previous_response_id": f"resp_{attacker.sessions[0]}", "model": attacker.model}
    return await post(attacker, target, json.dumps(body).encode())


async def _session(attacker: Attacker) -> str:
    """The name of one that has ended."""
    async with attacker.one_at_a_time:
        if not attacker.sessions:
            asked = gateway_pb2.GenerateRequest(
                prompt="x = 1\n", max_tokens=OUTPUT, ignore_eos=True, model=attacker.model
            )
            async for event in attacker.stub.Generate(asked):
                if event.HasField("started"):
                    attacker.sessions.append(event.started.session_id)
    return attacker.sessions[0]


async def resumes(attacker: Attacker, target: str) -> str:
    return await call(attacker.stub.Resume(gateway_pb2.ResumeRequest(session_id=await _session(attacker))))


async def branches(attacker: Attacker, target: str) -> str:
    asked = gateway_pb2.RollbackRequest(session_id=await _session(attacker), output_tokens=OUTPUT - 1, branch=True)
    return await call(attacker.stub.Rollback(asked))


async def edits(attacker: Attacker, target: str) -> str:
    session = await _session(attacker)
    asked = gateway_pb2.RollbackRequest(
        session_id=session, output_tokens=1, branch=True, text=long(attacker.text_bytes)
    )
    return await call(attacker.stub.Rollback(asked))


async def token_ids(attacker: Attacker, target: str) -> str:
    if not _is_rpc(target):
        return await _fixed("token ids")(attacker, target)
    half = gateway_pb2.TokenIds(token_ids=[200] * (MAX_MESSAGE_BYTES // 4 - 100))
    asked = gateway_pb2.GenerateRequest(
        prompt_token_ids=half, prediction=gateway_pb2.Prediction(token_ids=half), max_tokens=1, model=attacker.model
    )
    return await call(attacker.stub.Generate(asked))


async def above(attacker: Attacker, target: str) -> str:
    """A message above what gRPC takes."""
    text = "x" * (MAX_MESSAGE_BYTES + 1000)
    if target.endswith("Tokenize"):
        return await call(attacker.stub.Tokenize(gateway_pb2.TokenizeRequest(text=text)))
    return await call(attacker.stub.Generate(gateway_pb2.GenerateRequest(prompt=text)))


async def idle(attacker: Attacker, target: str) -> str:
    """Sixty-four connections that say nothing for a while."""
    host, port = attacker.address
    lines = []
    try:
        for _ in range(64):
            line = socket.socket()
            line.setblocking(False)
            line.bind((IDLE_ORIGIN, 0))
            lines.append(line)
            await asyncio.get_running_loop().sock_connect(line, (host, port))
        await asyncio.sleep(0.5)
        return ""
    except OSError:
        return "closed"
    finally:
        for line in lines:
            line.close()


async def watch(attacker: Attacker, target: str) -> str:
    stub = health_pb2_grpc.HealthStub(attacker.rpc)
    watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(64)]
    try:
        for each in watching:
            await each.read()
        return "cancelled"
    finally:
        for each in watching:
            each.cancel()


async def cancelled(attacker: Attacker, target: str) -> str:
    """A session whose client leaves as soon as it is there, in the middle of its prompt."""
    text = f"{next(_numbers)}: " + "x = 1\n" * (attacker.most_prompt // 5)
    asked = gateway_pb2.GenerateRequest(prompt=text, max_tokens=500, ignore_eos=True, model=attacker.model)
    return await _left(attacker.stub.Generate(asked))


async def taken_up(attacker: Attacker, target: str) -> str:
    """A session that waits in its record, taken up and left again before it has computed its prompt."""
    async with attacker.one_at_a_time:
        if not attacker.sessions:
            text = "x = 1\n" * (attacker.most_prompt // 5)
            asked = gateway_pb2.GenerateRequest(prompt=text, max_tokens=500, ignore_eos=True, model=attacker.model)
            answer = attacker.stub.Generate(asked)
            async for event in answer:
                if event.HasField("started"):
                    attacker.sessions.append(event.started.session_id)
                    break
            answer.cancel()
    return await _left(attacker.stub.Resume(gateway_pb2.ResumeRequest(session_id=attacker.sessions[0])))


async def _left(answer: Any) -> str:
    """Reads one event of a stream and leaves it."""
    try:
        await answer.read()
        return "cancelled"
    except grpc.RpcError as error:
        return str(error.code().name)
    finally:
        answer.cancel()


async def disconnects(attacker: Attacker, target: str) -> str:
    """A stream over HTTP whose connection is closed at its first byte."""
    body = json.dumps(text_of(target, f"{next(_numbers)}: x", 500, stream=True) | {"model": attacker.model}).encode()
    headers = {"content-type": "application/json", "x-api-key": attacker.http.headers["authorization"][7:]}
    try:
        async with attacker.http.stream("POST", target.split()[1], content=body, headers=headers) as response:
            async for _ in response.aiter_raw():
                break
            return "" if response.status_code == 200 else str(response.status_code)
    except httpx.TransportError:
        return "closed"


async def odd_texts(attacker: Attacker, target: str) -> str:
    """Marks on marks, joined signs and signs of many bytes, in texts that are just short enough for the event loop."""
    number = next(_numbers)
    odd = (
        "e" + "\u0301\u0323" * 40,
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\ufdfa\u0390",
        "\u202e\ue000\U000e0041",
    )
    text = f"{number}" + (odd[number % len(odd)] * 2048)[: 2047 - len(str(number))]
    if _is_rpc(target):
        return await call(attacker.stub.Tokenize(gateway_pb2.TokenizeRequest(text=text, model=attacker.model)))
    return await post(attacker, target, json.dumps(text_of(target, text, 1) | {"model": attacker.model}).encode())


async def requests(attacker: Attacker, target: str) -> str:
    if not _is_rpc(target):
        method, path = target.split()
        path = path.replace("{name}", "resp_nothing").replace("{name:path}", "nothing")
        try:
            return str((await attacker.http.request(method, path)).status_code)
        except httpx.TransportError:
            return "closed"
    service, name = target.rsplit("/")
    if service.endswith("GatewayService"):
        return await call(getattr(attacker.stub, name)(getattr(gateway_pb2, f"{name}Request")()))
    if service.endswith("Health"):
        stub = health_pb2_grpc.HealthStub(attacker.rpc)
        if name == "Watch":
            answer = stub.Watch(health_pb2.HealthCheckRequest())
            await answer.read()
            answer.cancel()
            return "cancelled"
        return await call(getattr(stub, name)(getattr(health_pb2, f"Health{name}Request")()))
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    key = (("authorization", attacker.http.headers["authorization"]),)
    info = attacker.rpc.stream_stream(
        f"/{target}",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    return await call(info(iter([asked] * 100), metadata=key))


ATTACKS: dict[str, Attack] = {
    "escapes": Attack(_fixed("escapes"), 8),
    "values": Attack(_fixed("values"), 8),
    "long text": Attack(long_text, 60),
    "predictions": Attack(_fixed("predictions"), 8),
    "messages": Attack(messages, 8),
    "token ids": Attack(token_ids, 8),
    "unknown fields": Attack(unknown_fields, 4),
    "long prompts": Attack(long_prompts, 8),
    "long texts": Attack(long_texts, 8),
    "short texts": Attack(short_texts, 8),
    "unread streams": Attack(unread, 8),
    "unclosed tool calls": Attack(tool_calls, 2),
    "inflating annotations": Attack(inflating, 4),
    "resumes": Attack(resumes, 8),
    "branches": Attack(branches, 8),
    "edits": Attack(edits, 8),
    "above 4 MiB": Attack(above, 4),
    "idle connections": Attack(idle, 8),
    "streams of health": Attack(watch, 4),
    "requests": Attack(requests, 16),
    "many requests": Attack(requests, 256),
    "sessions left at once": Attack(cancelled, 16),
    "sessions taken up and left": Attack(taken_up, 16),
    "streams closed at once": Attack(disconnects, 16),
    "odd texts": Attack(odd_texts, 64),
}
