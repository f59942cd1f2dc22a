"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients send and read them."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request

from gateway.api.anthropic.fields import CountRequest, MessageRequest
from gateway.api.http.choices import Choice, collect_choices
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.http.reply import Answer, Reply, trace_headers
from gateway.api.openai.chat import call_format
from gateway.api.openai.fields import log_unknown
from gateway.api.openai.usage import speculation_metrics
from gateway.request_context import RequestContext
from gateway.sessions.output_stream import Event
from gateway.text.forced_calls import forced_call
from gateway.text.tool_calls import Part, ToolCall, new_reader
from slipstream.v1 import gateway_pb2, verifier_pb2

PREFIX = "msg_"


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])

    @router.post("/v1/messages")
    async def create(asked: MessageRequest, request: Request) -> Answer:
        """Answers a conversation."""
        log_unknown(asked)
        tools = asked.tool_data()
        format = call_format(parts, tools)
        prompt = await parts.tokenizer.encode_chat(asked.template_data(), tools)
        generate = asked.sampling().to_generate(prompt, 0, forced_call(format, tools, asked.forced_name))
        call = _MessageCall(parts, context_of(request.scope), generate, format)
        return Answer(call.stream if asked.stream else call.whole, parts.config.http_idle_s)

    @router.post("/v1/messages/count_tokens")
    async def count(asked: CountRequest) -> dict[str, Any]:
        """Tokens of the prompt that a conversation makes."""
        log_unknown(asked)
        parts.router.model(asked.model)
        tokens = len(await parts.tokenizer.encode_chat(asked.template_data(), asked.tool_data()))
        return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}

    return router


class _MessageCall:
    def __init__(
        self, parts: HttpDependencies, context: RequestContext, request: gateway_pb2.GenerateRequest, format: str
    ) -> None:
        self._parts = parts
        self._context = context
        self._request = request
        self._format = format

    async def whole(self, reply: Reply) -> None:
        (choice,) = await collect_choices(self._parts.sessions, self._context, [self._request])
        reader = new_reader(self._format)
        blocks: list[dict[str, Any]] = []
        for part in [*reader.push(choice.text), *reader.finish()]:
            if isinstance(part, str) and blocks and blocks[-1]["type"] == "text":
                blocks[-1]["text"] += part
            elif isinstance(part, str):
                blocks.append({"type": "text", "text": part})
            else:
                blocks.append(_tool_use(part, choice.started, len(blocks)) | {"input": json.loads(part.arguments)})
        assert choice.finished is not None
        called = any(block["type"] == "tool_use" for block in blocks)
        message = _message(choice.started, blocks) | _ending(choice.finished, called=called)
        message["usage"] |= {"output_tokens": choice.finished.output_tokens}
        if metrics := speculation_metrics(choice.finished.statistics):
            message["metrics"] = metrics
        await reply.send_json(message, trace_headers(self._context.trailers))

    async def stream(self, reply: Reply) -> None:
        events = _MessageEvents(self._format)

        async def send(event: Event) -> None:
            for made in events.read(event):
                await reply.send_event(json.dumps(made), name=made["type"])

        await self._parts.sessions.generate(self._request, self._context, send)
        await reply.end_events()


class _MessageEvents:
    """The events of a message: blocks are opened and closed one after the other."""

    def __init__(self, format: str) -> None:
        self._reader = new_reader(format)
        self._choice = Choice(0)
        self._blocks = 0
        self._text_open = self._called = False

    def read(self, event: Event) -> list[dict[str, Any]]:
        """The events that an event of the session causes."""
        if isinstance(event, gateway_pb2.Started):
            self._choice.add(event)
            return [{"type": "message_start", "message": _message(event, [])}, {"type": "ping"}]
        if isinstance(event, gateway_pb2.Delta):
            return [made for part in self._reader.push(event.text) for made in self._part(part)]
        made = [made for part in self._reader.finish() for made in self._part(part)]
        made += self._close_text()
        usage = {"output_tokens": event.output_tokens}
        last = {"type": "message_delta", "delta": _ending(event, called=self._called), "usage": usage}
        if metrics := speculation_metrics(event.statistics):
            last["metrics"] = metrics
        return [*made, last, {"type": "message_stop"}]

    def _part(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, str):
            made = [] if self._text_open else self._open({"type": "text", "text": ""})
            self._text_open = True
            return [*made, self._delta({"type": "text_delta", "text": part})]
        self._called = True
        closed = self._close_text()
        made = self._open(_tool_use(part, self._choice.started, self._blocks))
        return [*closed, *made, self._delta({"type": "input_json_delta", "partial_json": part.arguments}), self._stop()]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": self._blocks, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _close_text(self) -> list[dict[str, Any]]:
        if not self._text_open:
            return []
        self._text_open = False
        return [self._stop()]

    def _stop(self) -> dict[str, Any]:
        self._blocks += 1
        return {"type": "content_block_stop", "index": self._blocks - 1}


def _message(started: gateway_pb2.Started, content: list[dict[str, Any]]) -> dict[str, Any]:
    usage = {
        "input_tokens": len(started.prompt_token_ids),
        "output_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    return {
        "id": PREFIX + started.session_id,
        "type": "message",
        "role": "assistant",
        "model": started.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _ending(finished: gateway_pb2.Finished, *, called: bool) -> dict[str, Any]:
    reason = "max_tokens" if finished.reason == verifier_pb2.FINISH_REASON_LENGTH else "end_turn"
    if finished.stop:
        reason = "stop_sequence"
    elif called and reason == "end_turn":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": finished.stop or None}


def _tool_use(call: ToolCall, started: gateway_pb2.Started, index: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{started.session_id}_{index}", "name": call.name, "input": {}}
