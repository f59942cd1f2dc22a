"""What a streamed chunk costs the HTTP front, in Python calls of the gateway: `python -m benchmarks.http` measures the
time that they take."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.anthropic.messages import MessageEvents
from gateway.api.http.reply import answer_of_events
from gateway.api.openai.chat import ChatCall, ChatRequest
from gateway.api.openai.completions import CompletionCall, CompletionRequest
from gateway.request_context import RequestContext
from gateway.requests.answers import AnswerPlan
from gateway.requests.texts import tokens_of
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.support.call_counts import calls_of

CONTEXT = RequestContext([], "ipv4:127.0.0.1:1")
MOST_CALLS = {"completions": 15, "chat": 22, "messages": 11}
"""Calls for each chunk, with little room above what was counted."""


class Sessions:
    """Sends a session of so many tokens, each as an event of its own."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def generate(self, request: Any, context: Any, send: Any, texts: Any = None) -> None:
        await send(gateway_pb2.Started(session_id="s", model="toy", prompt_token_ids=[1]))
        for offset in range(self._tokens):
            await send(gateway_pb2.Delta(offset=offset, token_ids=[5], text="word "))
        await send(gateway_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH, output_tokens=self._tokens))


def answer(protocol: str, parts: Any) -> Any:
    if protocol == "completions":
        asked = CompletionRequest.model_validate({"prompt": "x", "stream": True})
        return CompletionCall(parts, CONTEXT, asked).answer(None, {})
    if protocol == "chat":
        chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "stream": True})
        return ChatCall(parts, CONTEXT, chat, tokens_of([1]), AnswerPlan()).answer(None, {})

    async def generate(send: Any) -> None:
        await parts.sessions.generate(None, CONTEXT, send)

    return answer_of_events(MessageEvents(AnswerPlan()), generate, CONTEXT, 60.0, stream=True)


def stream(protocol: str, tokens: int) -> int:
    """Chunks that were written."""
    written: list[bytes] = []

    async def send(message: Any) -> None:
        written.append(message.get("body", b""))

    async def run() -> None:
        parts = SimpleNamespace(
            config=SimpleNamespace(max_tokens_default=0, http_idle_s=60.0),
            sessions=Sessions(tokens),
            tokenizer=SimpleNamespace(least_tokens=len, encoding=SimpleNamespace(around=(0, 0))),
        )
        scope = {"path": "/", "extensions": {}, "state": {"slipstream.request_context": CONTEXT}}
        await answer(protocol, parts)(scope, asyncio.Event().wait, send)

    asyncio.run(run())
    return sum(b"word " in part for part in written)


@pytest.mark.parametrize("protocol", MOST_CALLS)
def test_a_chunk_costs_few_calls(protocol: str) -> None:
    counts = {}
    for tokens in (100, 300):
        counts[tokens] = calls_of(lambda tokens=tokens: stream(protocol, tokens), "gateway")  # type: ignore[misc]
    assert stream(protocol, 300) >= 300
    assert (counts[300] - counts[100]) / 200 <= MOST_CALLS[protocol]
