"""What one client sends ends no text of another one: real processes, and a gateway that has one verifier only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from slipstream.client.gateway_endpoint import digest, new_key
from slipstream.errors import MESSAGE_TOO_LARGE
from slipstream.rpc.channel import MAX_MESSAGE_BYTES, channel, error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.conftest import ROOT, UNMEASURED, starting
from tests.support.fleet import emulated_text
from tests.support.follower import Follower

TWO_BYTES = 200
"""A token's id that takes two bytes in a message."""
TOKENS = 120


def largest_request() -> gateway_pb2.GenerateRequest:
    """A request of gRPC's largest size, whose prompt and prediction no message to a verifier can hold."""
    half = MAX_MESSAGE_BYTES // 4
    made = gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(token_ids=[TWO_BYTES] * (half - 100)),
        prediction=gateway_pb2.Prediction(token_ids=gateway_pb2.TokenIds(token_ids=[TWO_BYTES] * (half - 100))),
        max_tokens=1,
    )
    room = MAX_MESSAGE_BYTES - 8 - made.ByteSize()
    made.prompt_token_ids.token_ids.extend([TWO_BYTES] * min(99, room // 2))
    made.prediction.token_ids.token_ids.extend([TWO_BYTES] * ((MAX_MESSAGE_BYTES - 8 - made.ByteSize()) // 2))
    assert MAX_MESSAGE_BYTES - 16 < made.ByteSize() < MAX_MESSAGE_BYTES
    return made


async def test_requests_too_large_for_a_stream_are_refused_and_others_texts_end_where_they_began() -> None:
    async with starting() as (stack, start):
        settings = {"MODEL": "emulated:base_ms=20", "LISTEN": "127.0.0.1:0", "KV_TOKENS": "4000000"}
        _, verifier = await start(
            "verifier_svc", **{f"VERIFIER_{name}": value for name, value in settings.items()}, **UNMEASURED
        )
        _, address = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=verifier,
            GATEWAY_TOKENIZER=str(ROOT / "models" / "target"),
            GATEWAY_MAX_PROMPT_BYTES=str(MAX_MESSAGE_BYTES),  # requests as large as its clients may send
            GATEWAY_REHOMING_WAIT_S="120",
        )
        stub = gateway_pb2_grpc.GatewayServiceStub(await stack.enter_async_context(channel(address)))
        texts = [Follower(stub, [first, 8, 9], TOKENS) for first in range(3)]
        async with asyncio.timeout(120):
            while not all(text.tokens for text in texts):
                await asyncio.sleep(0.01)
        for _ in range(6):
            with pytest.raises(grpc.RpcError) as refused:
                async for _ in stub.Generate(largest_request(), timeout=120):
                    pass
            assert error_of(refused.value).reason == MESSAGE_TOO_LARGE, refused.value
        await asyncio.gather(*(text.reading for text in texts))
        for text in texts:
            assert text.tokens == emulated_text(text.prompt, TOKENS)
            record = await stub.GetSession(gateway_pb2.GetSessionRequest(session_id=text.session_id))
            assert record.statistics.rehomed == 0


ALICE, BOB = new_key(), new_key()
LIMITS = {"alice": ", sessions = 1000, tokens_per_minute = 10000000", "bob": ""}
"""Of the key that attacks, and of its neighbour."""
CHAT_TEMPLATE = "{% for each in messages %}<{{ each.role }}>{{ each.content | trim }}\n{% endfor %}"
LONG = "Nobody knows, so many words. " * 6_000
MESSAGES = [{"role": "user", "content": f"message {number}: {'many words, ' * 4}"} for number in range(1_500)]
ATTACKS: dict[str, tuple[str, Any]] = {
    "prompts that are refused": ("/v1/completions", {"prompt": 2 * LONG, "max_tokens": 1}),
    "predictions": ("/v1/completions", {"prompt": "x", "n": 8, "prediction": {"content": LONG}, "max_tokens": 1}),
    "texts to count": ("/tokenize", {"prompt": LONG}),
    "messages to count": ("/tokenize", {"messages": MESSAGES}),
    "messages of Anthropic's to count": ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    "tokens to decode": ("/detokenize", {"tokens": list(range(256)) * 500}),
}


TURNED_AWAY = ("work", "bodies")
"""Codes of requests that cost nothing, for there were too many."""


@dataclass
class Tenants:
    """Two keys of one gateway."""

    alice: httpx.AsyncClient
    bob: httpx.AsyncClient

    async def attack(self, path: str, content: bytes) -> str:
        """The code of the error, if any. The gateway may close the connection before it has read everything."""
        try:
            answer = await self.alice.post(path, content=content, headers={"content-type": "application/json"})
        except httpx.TransportError:
            return "bodies"
        return str(answer.json().get("error", {}).get("code", ""))


@asynccontextmanager
async def tenants(folder: Path) -> AsyncIterator[Tenants]:
    """Of a gateway whose limits are the ones that it has by itself, and whose model takes LONG, and not twice that."""
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    keys = {"alice": ALICE, "bob": BOB}
    lines = [f'{name} = {{ sha256 = "{digest(keys[name]).hex()}"{limits} }}\n' for name, limits in LIMITS.items()]
    (folder / "keys.toml").write_text("".join(lines))
    async with starting() as (stack, start):
        settings = {"MODEL": "emulated:base_ms=5&vocabulary=8192", "LISTEN": "127.0.0.1:0"}
        _, verifier = await start(
            "verifier_svc",
            **{f"VERIFIER_{name}": value for name, value in (settings | {"KV_TOKENS": "100000"}).items()},
            **UNMEASURED,
        )
        gateway, _ = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_HTTP="127.0.0.1:0",
            GATEWAY_VERIFIERS=verifier,
            GATEWAY_TOKENIZER=str(ROOT / "models" / "target"),
            GATEWAY_CHAT_TEMPLATE=str(folder / "chat.jinja"),
            GATEWAY_API_KEYS=str(folder / "keys.toml"),
        )
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=f"http://{gateway.http}",
                    headers={"authorization": f"Bearer {key}"},
                    timeout=600,
                    limits=httpx.Limits(max_connections=None),
                    trust_env=False,
                )
            )
            for key in (ALICE, BOB)
        ]
        yield Tenants(*clients)


async def test_texts_of_one_key_hold_up_no_prompt_of_another_one(tmp_path: Path) -> None:
    """Its long prompts are answered before a half of what came before them is."""
    async with tenants(tmp_path) as both:
        for name, (path, body) in ATTACKS.items():
            content = json.dumps(body).encode()
            sent = [asyncio.create_task(both.attack(path, content)) for _ in range(24)]
            await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            for number in range(6):
                prompt = f"{number}: " + "a longer text, which is encoded beside the event loop; " * 60
                answer = await both.bob.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
                assert answer.status_code == 200, answer.text
            ended = [task.result() for task in sent if task.done()]
            assert len([code for code in ended if code not in TURNED_AWAY]) < len(sent) / 2, (name, ended)
            for task in sent:
                task.cancel()
            await asyncio.wait(sent)
