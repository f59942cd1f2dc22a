"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients send and read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from gateway.api.anthropic.fields import CountRequest, MessageRequest
from gateway.api.http.body import BodyRoute
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.http.errors import ANTHROPIC
from gateway.api.http.reply import Answer, answer_of_events
from gateway.api.openai.chat import call_format
from gateway.api.openai.fields import log_unknown
from gateway.api.openai.usage import mixture, speculation_metrics
from gateway.requests.texts import Texts, chat_of
from gateway.sessions.output_stream import Event
from gateway.text.tool_calls import Part, ToolCall, forced_call, new_reader
from slipstream.v1 import gateway_pb2, verifier_pb2

PREFIX = "msg_"


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=[ANTHROPIC], route_class=BodyRoute)

    @router.post("/v1/messages")
    async def create(asked: MessageRequest, request: Request) -> Answer:
        """Answers a conversation."""
        log_unknown(asked)
        tools = asked.tool_data()
        format = call_format(parts, tools)
        texts = Texts(chat_of(parts.tokenizer, asked.template_data(), tools, asked.template_variables()))
        generate = asked.sampling().to_generate(None, 0, forced_call(format, tools, asked.forced_name))
        context, idle_s = context_of(request.scope), parts.config.http_idle_s
        follow = partial(parts.sessions.generate, generate, context, texts=texts)
        return answer_of_events(
            MessageEvents(format, asked.stop_sequences or ()), follow, context, idle_s, stream=bool(asked.stream)
        )

    @router.post("/v1/messages/count_tokens")
    async def count(asked: CountRequest, request: Request) -> dict[str, Any]:
        """Tokens of the prompt that a conversation makes."""
        log_unknown(asked)
        parts.router.model(asked.model)
        data = asked.template_data(), asked.tool_data(), asked.template_variables()
        tokens = len(await parts.tokenizer.encode_chat(*data, tenant=context_of(request.scope).tenant))
        return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}

    return router


class MessageEvents:
    """The events of a message: blocks are opened and closed one after the other."""

    def __init__(self, format: str, stops: Sequence[str] = ()) -> None:
        """`stops`: the client's own."""
        self._stops = stops
        self._reader = new_reader(format)
        self._started = gateway_pb2.Started()
        self._message: dict[str, Any] = {}
        self._content: list[dict[str, Any]] = []
        self._text: list[str] = []
        """Pieces of the block of text that is open."""
        self._text_open = False

    def whole(self) -> dict[str, Any]:
        """The message, once its session has ended."""
        return self._message

    def read(self, event: Event) -> list[dict[str, Any]]:
        """The events that an event of the session causes."""
        if isinstance(event, gateway_pb2.Started):
            self._started = event
            return [{"type": "message_start", "message": _message(event, [])}, {"type": "ping"}]
        if isinstance(event, gateway_pb2.Delta):
            return [made for part in self._reader.push(event.text) for made in self._part(part)]
        made = [made for part in self._reader.finish() for made in self._part(part)]
        made += self._close_text()
        return [*made, self._finish(event), {"type": "message_stop"}]

    def _finish(self, finished: gateway_pb2.Finished) -> dict[str, Any]:
        """The event that tells how the message ended."""
        called = any(block["type"] == "tool_use" for block in self._content)
        ending, usage = _ending(finished, self._stops, called=called), _usage(self._started, finished)
        metrics = speculation_metrics(finished.statistics)
        about = ({"metrics": metrics} if metrics else {}) | mixture(finished.statistics)
        self._message = _message(self._started, self._content) | ending | about | {"usage": usage}
        return {"type": "message_delta", "delta": ending, "usage": usage, **about}

    def _part(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, str):
            made = [] if self._text_open else self._open({"type": "text", "text": ""})
            self._text_open = True
            self._text.append(part)
            return [*made, self._delta({"type": "text_delta", "text": part})]
        closed = self._close_text()
        made = self._open(_tool_use(part, self._started, len(self._content)))
        self._content[-1]["input"] = json.loads(part.arguments)
        return [*closed, *made, self._delta({"type": "input_json_delta", "partial_json": part.arguments}), self._stop()]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Opens the block, which is empty in its event."""
        self._content.append(dict(block))
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close_text(self) -> list[dict[str, Any]]:
        if not self._text_open:
            return []
        self._content[-1]["text"], self._text = "".join(self._text), []
        self._text_open = False
        return [self._stop()]

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        """Index of the block that was opened last."""
        return len(self._content) - 1


def _usage(started: gateway_pb2.Started, finished: gateway_pb2.Finished) -> dict[str, int]:
    """Counts of the whole message. Anthropic's clients add up the three parts of the prompt."""
    cached = finished.statistics.cached_prompt_tokens
    return {
        "input_tokens": len(started.prompt_token_ids) - cached,
        "output_tokens": finished.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _message(started: gateway_pb2.Started, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": PREFIX + started.session_id,
        "type": "message",
        "role": "assistant",
        "model": started.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(started, gateway_pb2.Finished()),
    }


def _ending(finished: gateway_pb2.Finished, stops: Sequence[str], *, called: bool) -> dict[str, Any]:
    reason = "max_tokens" if finished.reason == verifier_pb2.FINISH_REASON_LENGTH else "end_turn"
    stop = finished.stop if finished.stop in stops else None
    if stop:
        reason = "stop_sequence"
    elif called and reason == "end_turn":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop}


def _tool_use(call: ToolCall, started: gateway_pb2.Started, index: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{started.session_id}_{index}", "name": call.name, "input": {}}
