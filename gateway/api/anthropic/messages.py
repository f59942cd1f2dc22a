"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients send and read them."""

from __future__ import annotations

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
from gateway.api.openai.call_arguments import as_object
from gateway.api.openai.fields import log_unknown
from gateway.api.openai.usage import mixture, speculation_metrics
from gateway.requests.answers import AnswerPlan, AnswerWish, fitted_chat, plan_of
from gateway.requests.texts import Texts, chat_of
from gateway.sessions.output_stream import Event
from gateway.text.answers.reader import AnswerReader, Arguments, CallEnded, Part, PlainReader, Reasoning, joined
from slipstream.v1 import gateway_pb2, verifier_pb2

PREFIX = "msg_"
TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=[ANTHROPIC], route_class=BodyRoute)

    @router.post("/v1/messages")
    async def create(asked: MessageRequest, request: Request) -> Answer:
        """Answers a conversation."""
        log_unknown(asked)
        tools, variables, sampling = asked.tool_data(), asked.template_variables(), asked.sampling()
        messages = await asked.template_data()
        own, single = sampling.structure(), asked.one_call
        wish = AnswerWish(tools, variables, asked.forced_name, own, single, messages[-1], asked.most_reasoning)
        plan = plan_of(parts.tokenizer, parts.config, wish)
        fitting = await fitted_chat(parts.tokenizer, messages, tools, variables)
        texts = Texts(await chat_of(parts.tokenizer, fitting, tools, variables))
        generate = sampling.to_generate(None, 0, plan)
        context, idle_s = context_of(request.scope), parts.config.http_idle_s
        follow = partial(parts.sessions.generate, generate, context, texts=texts)
        events = MessageEvents(plan, asked.stop_sequences or ())
        return answer_of_events(events, follow, context, idle_s, stream=bool(asked.stream))

    @router.post("/v1/messages/count_tokens")
    async def count(asked: CountRequest, request: Request) -> dict[str, Any]:
        """Tokens of the prompt that a conversation makes."""
        log_unknown(asked)
        parts.router.model(asked.model)
        tools, variables = asked.tool_data(), asked.template_variables()
        messages = await fitted_chat(parts.tokenizer, await asked.template_data(), tools, variables)
        tenant = context_of(request.scope).tenant
        tokens = len(await parts.tokenizer.encode_chat(messages, tools, variables, tenant=tenant))
        return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}

    return router


class MessageEvents:
    """The events of a message: blocks are opened and closed one after the other."""

    def __init__(self, plan: AnswerPlan, stops: Sequence[str] = ()) -> None:
        """`stops`: the client's own."""
        self._stops = stops
        self._plan = plan
        self._reader: AnswerReader = PlainReader()
        self._started = gateway_pb2.Started()
        self._message: dict[str, Any] = {}
        self._content: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Pieces of the text, or the input, of the block that is open."""
        self._open = ""
        """Kind of that block; empty for none."""

    def whole(self) -> dict[str, Any]:
        """The message, once its session has ended."""
        return self._message

    def read(self, event: Event) -> list[dict[str, Any]]:
        """The events that an event of the session causes."""
        if isinstance(event, gateway_pb2.Started):
            self._started, self._reader = event, self._plan.reader(event)
            return [{"type": "message_start", "message": _message(event, [])}, {"type": "ping"}]
        if isinstance(event, gateway_pb2.Delta):
            parts = self._reader.push(event.text)
            return [made for part in (parts if len(parts) < 2 else joined(parts)) for made in self._part(part)]
        made = [made for part in joined(self._reader.finish()) for made in self._part(part)]
        made += self._close()
        return [*made, self._finish(event), {"type": "message_stop"}]

    def _finish(self, finished: gateway_pb2.Finished) -> dict[str, Any]:
        """The event with the message's end."""
        called = any(block["type"] == TOOL_USE for block in self._content)
        ending, usage = _ending(finished, self._stops, called=called), _usage(self._started, finished)
        metrics = speculation_metrics(finished.statistics)
        about = ({"metrics": metrics} if metrics else {}) | mixture(finished.statistics)
        self._message = _message(self._started, self._content) | ending | about | {"usage": usage}
        return {"type": "message_delta", "delta": ending, "usage": usage, **about}

    def _part(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, str):
            made = [] if self._open == TEXT else self._open_block(TEXT, {"text": ""})
            self._pieces.append(part)
            return [*made, self._delta("text_delta", text=part)]
        if isinstance(part, Reasoning):
            empty = {"thinking": "", "signature": ""}
            made = [] if self._open == THINKING else self._open_block(THINKING, empty)
            self._pieces.append(part.text)
            return [*made, self._delta("thinking_delta", thinking=part.text)]
        if isinstance(part, Arguments):
            self._pieces.append(part.text)
            return [self._delta("input_json_delta", partial_json=part.text)]
        closed = self._close()
        if isinstance(part, CallEnded):
            return closed
        id = self._plan.call_id(self._started, len(self._content), part)
        return [*closed, *self._open_block(TOOL_USE, {"id": id, "name": part.name, "input": {}})]

    def _open_block(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Opens the block, which is empty in its event."""
        closed, block = self._close(), {"type": kind, **block}
        self._open = kind
        self._content.append(dict(block))
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        made, block, whole = list[dict[str, Any]](), self._content[-1], "".join(self._pieces)
        if self._open == TOOL_USE:
            block["input"] = as_object(whole)
        else:
            block[self._open] = whole
        if self._open == THINKING:
            block["signature"] = f"{self._started.session_id}_{self._index}"
            made.append(self._delta("signature_delta", signature=block["signature"]))
        self._open, self._pieces = "", []
        return [*made, {"type": "content_block_stop", "index": self._index}]

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
