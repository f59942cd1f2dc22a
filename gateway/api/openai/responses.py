"""`/v1/responses`: one answer as a record that can be read again, streamed from any event on, and cancelled.

A response is a session: `resp_` and the session's id. Its events are numbered by the characters of the text that they
stand behind, so that every gateway numbers them alike, however the text came.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.http.reply import Answer, Reply, trace_headers
from gateway.api.openai.chat import MAX_TOOLS, call_format, forced_name, parsed_arguments
from gateway.api.openai.fields import Fields, JsonSchemaField, ResponseFormat, SamplingFields, log_unknown
from gateway.api.openai.response_events import ResponseEvents
from gateway.api.openai.usage import speculation_metrics
from gateway.request_context import RequestContext
from gateway.requests.chat import MAX_MESSAGES
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import Send
from gateway.text.forced_calls import forced_call
from gateway.text.tool_calls import new_reader
from slipstream.errors import InvalidArgument, NotFound
from slipstream.v1 import gateway_pb2, verifier_pb2

PREFIX = "resp_"
Follow = Callable[[Send], Awaitable[None]]
"""Sends the events of a session."""
RESPONSE_ID = r"^resp_[!-~]{1,64}$"


class ContentPart(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(Fields):
    """A message, a call that the model made, or what the call gave."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    def as_template_data(self) -> dict[str, Any] | None:
        """The item as a message of a chat; None for one that templates do not know."""
        if self.type == "reasoning":
            return None
        if self.type == "function_call":
            function = {"name": self.name or "", "arguments": parsed_arguments(self.arguments or "")}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": self.output or "", "tool_call_id": self.call_id}
        content = (
            self.content if isinstance(self.content, str | None) else "\n".join(part.text for part in self.content)
        )
        return {"role": self.role or "user", "content": content or ""}


class FunctionTool(Fields):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(Fields):
    """As `response_format`, but the schema's fields stand beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextField(Fields):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseRequest(SamplingFields):
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**32 - 1)
    background: bool | None = None
    """Answer at once, and generate without a client."""
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    text: TextField | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Raises InvalidArgument for what this server does not do."""
        if self.previous_response_id:
            raise InvalidArgument("previous_response_id is not served; send the whole conversation as input.")
        if self.choices != 1:
            raise InvalidArgument("A response has one choice; leave n out.")
        if self.text and self.text.format:
            self.response_format = _response_format(self.text.format)
        self.max_tokens = self.max_output_tokens or self.max_tokens

    def template_data(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        return [*system, *(data for item in self.input if (data := item.as_template_data()))]

    def tool_data(self) -> list[dict[str, Any]]:
        if not self.tools or self.tool_choice == "none":
            return []
        fields = ("name", "description", "parameters")
        plain = [{name: value for name in fields if (value := getattr(tool, name)) is not None} for tool in self.tools]
        return [{"type": "function", "function": function} for function in plain]


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    running: set[asyncio.Task[None]] = set()
    """Sessions in the background."""

    @router.post("/v1/responses")
    async def create(asked: ResponseRequest, request: Request) -> Answer:
        """Answers an input, as a record that can be read again."""
        log_unknown(asked)
        asked.check()
        context, tools = context_of(request.scope), asked.tool_data()
        format = call_format(parts, tools)
        prompt = await parts.tokenizer.encode_chat(asked.template_data(), tools)
        wanted = asked.to_generate(prompt, 0, forced_call(format, tools, forced_name(asked.tool_choice)))
        known = {"created_at": int(time.time()), "format": format, "metadata": asked.metadata or {}}
        wanted.annotation = json.dumps(known).encode()
        call = _ResponseCall(context, known)

        generate = partial(parts.sessions.generate, wanted, context)
        if asked.background and not asked.stream:
            return Answer(lambda reply: call.begin(reply, generate, running), parts.config.http_idle_s)
        work = call.stream if asked.stream else call.whole
        return Answer(lambda reply: work(reply, generate), parts.config.http_idle_s)

    @router.get("/v1/responses/{name}")
    async def read(
        name: Annotated[str, Field(pattern=RESPONSE_ID)],
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, lt=2**40)] = -1,
    ) -> Answer:
        """The response as it is, or its events behind a number."""
        session_id, context = name.removeprefix(PREFIX), context_of(request.scope)
        record = await parts.sessions.describe(session_id)
        call = _ResponseCall(context, _kept(record.annotation), starting_after)

        resume = partial(_resume, parts, session_id, context)
        if stream:
            return Answer(lambda reply: call.stream(reply, resume), parts.config.http_idle_s)
        if record.finish_reason:
            return Answer(lambda reply: call.whole(reply, resume), parts.config.http_idle_s)
        started = gateway_pb2.Started(session_id=session_id, model=record.model)
        return Answer(lambda reply: reply.send_json(call.unfinished(started)), parts.config.http_idle_s)

    @router.post("/v1/responses/{name}/cancel")
    async def cancel(name: Annotated[str, Field(pattern=RESPONSE_ID)]) -> dict[str, Any]:
        """Ends the response, wherever it runs."""
        session_id = name.removeprefix(PREFIX)
        _kept((await parts.sessions.describe(session_id)).annotation)
        await parts.sessions.cancel(session_id)
        return {"id": name, "object": "response", "status": "cancelled"}

    return router


async def _resume(parts: HttpDependencies, session_id: str, context: RequestContext, send: Send) -> None:
    """Sends the session from its beginning."""
    request = gateway_pb2.ResumeRequest(session_id=session_id, offset=0, characters=0)
    await parts.sessions.resume(request, context, send)


class _ResponseCall:
    def __init__(self, context: RequestContext, known: Mapping[str, Any], starting_after: int = -1) -> None:
        """`known`: what the session's annotation holds."""
        self._context = context
        self._known = known
        self._events = ResponseEvents(known["format"], self._record, starting_after)

    async def stream(self, reply: Reply, follow: Follow) -> None:
        async def send(event: Event) -> None:
            for made in self._events.read(event):
                await reply.send_event(json.dumps(made), name=made["type"])

        await follow(send)
        await reply.end_events()

    async def whole(self, reply: Reply, follow: Follow) -> None:
        last: dict[str, Any] = {}

        async def send(event: Event) -> None:
            for made in self._events.read(event):
                last.update(made)

        await follow(send)
        await reply.send_json(last["response"], trace_headers(self._context.trailers))

    async def begin(self, reply: Reply, follow: Follow, running: set[asyncio.Task[None]]) -> None:
        """Answer when the session has begun; it goes on without the client."""
        began: asyncio.Future[gateway_pb2.Started] = asyncio.get_running_loop().create_future()

        async def drop(event: Event) -> None:
            if isinstance(event, gateway_pb2.Started):
                began.set_result(event)

        task = asyncio.ensure_future(follow(drop))
        running.add(task)
        task.add_done_callback(running.discard)
        either: list[asyncio.Future[Any]] = [task, began]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not began.done():
            task.result()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await reply.send_json(self.unfinished(began.result()))

    def unfinished(self, started: gateway_pb2.Started) -> dict[str, Any]:
        return self._record(started, [], None)

    def _record(
        self, started: gateway_pb2.Started, output: list[dict[str, Any]], finished: gateway_pb2.Finished | None
    ) -> dict[str, Any]:
        status, incomplete = _status(finished)
        record = {
            "id": PREFIX + started.session_id,
            "object": "response",
            "created_at": self._known["created_at"],
            "status": status,
            "model": started.model,
            "output": output,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": None,
            "metadata": self._known["metadata"],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None if finished is None else _usage(started, finished),
        }
        if finished is not None and (metrics := speculation_metrics(finished.statistics)):
            record["metrics"] = metrics
        return record


def _status(finished: gateway_pb2.Finished | None) -> tuple[str, dict[str, str] | None]:
    if finished is None:
        return "in_progress", None
    if finished.reason == verifier_pb2.FINISH_REASON_LENGTH:
        return "incomplete", {"reason": "max_output_tokens"}
    statuses = {verifier_pb2.FINISH_REASON_STOP: "completed", verifier_pb2.FINISH_REASON_CANCELLED: "cancelled"}
    return statuses.get(finished.reason, "failed"), None


def _usage(started: gateway_pb2.Started, finished: gateway_pb2.Finished) -> dict[str, Any]:
    prompt, output = len(started.prompt_token_ids), finished.output_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": finished.statistics.cached_prompt_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


def _kept(annotation: bytes) -> dict[str, Any]:
    """What a response's session keeps. Raises NotFound for a session that is no response."""
    try:
        known = json.loads(annotation)
        new_reader(known["format"])
        return {"created_at": int(known["created_at"]), "metadata": dict(known["metadata"]), "format": known["format"]}
    except (ValueError, KeyError, TypeError) as error:  # a client of gRPC may keep anything
        raise NotFound("There is no such response.", reason="NO_RESPONSE") from error


def _response_format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    if format.schema_ is None:
        raise InvalidArgument("text.format json_schema has no schema.")
    return ResponseFormat(type=format.type, json_schema=JsonSchemaField(schema=format.schema_))
