"""`/v1/responses`: one answer as a record that can be read again, streamed from any event on, gone on from, and
cancelled.

A response is a session: `resp_` and the session's id. Its events are numbered by the characters of the text that they
stand behind, so that every gateway numbers them alike, however the text came.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field, TypeAdapter

from gateway.api.http.body import BodyRoute
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.http.reply import Answer, Follow, Reply, answer_of_events
from gateway.api.openai.call_arguments import with_objects
from gateway.api.openai.chat import forced_name
from gateway.api.openai.fields import log_unknown
from gateway.api.openai.response_events import ResponseEvents
from gateway.api.openai.response_fields import (
    LOGPROBS,
    Input,
    InputItem,
    ResponseRequest,
    ResponseTokensRequest,
    messages_of,
)
from gateway.api.openai.response_logprobs import with_logprobs
from gateway.api.openai.response_views import LoggedEvents, input_items, output_so_far, page_of
from gateway.api.openai.usage import accepted_and_rejected, mixture, speculation_metrics
from gateway.auth.tenant import Tenant
from gateway.request_context import RequestContext
from gateway.requests.answers import AnswerPlan, AnswerWish, fitted_chat, plan_of
from gateway.requests.texts import chat_of
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import Send
from gateway.text.answers.formats import AnswerFormat
from gateway.text.chat_messages import MAX_MESSAGES
from gateway.text.json_body import put_together
from gateway.text.worker import inflated
from gateway.work.pieces import in_pieces, json_in_pieces
from slipstream.errors import TOO_MANY_ITEMS, InvalidArgument, NotFound
from slipstream.v1 import gateway_pb2, verifier_pb2

PREFIX = "resp_"
AT_ONCE = 16_384
"""Bytes of JSON that are compressed, or inflated to, on the event loop: less than 1 ms."""
RESPONSE_ID = r"^resp_[!-~]{1,64}$"
ITEM_ID = r"(?:item|msg|rs)_([0-9a-f]{1,64})_\d{1,6}(?:_\d{1,6})?"
"""An item of a response's output or input, with the session in it."""
MAX_REFERRED = 16
"""Responses whose items one request may refer to."""
UNASKED: dict[str, Any] = {
    "instructions": None,
    "background": False,
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Values in a response of fields that its request left out."""
Name = Annotated[str, Field(pattern=RESPONSE_ID)]


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
    running: set[asyncio.Task[None]] = set()
    """Sessions in the background."""

    @router.post("/v1/responses")
    async def create(asked: ResponseRequest, request: Request) -> Answer:
        """Answers an input, as a record that can be read again."""
        log_unknown(asked)
        asked.check()
        context, tools, variables = context_of(request.scope), asked.tool_data(), asked.template_variables()
        before = (
            await _conversation(parts, asked.previous_response_id, context.tenant) if asked.previous_response_id else []
        )
        messages = [*before, *await _messages(parts, asked.input, context.tenant)]
        if len(messages) > MAX_MESSAGES:
            raise InvalidArgument(
                f"The conversation is above {MAX_MESSAGES} messages; begin another one.",
                reason=TOO_MANY_ITEMS,
                field="input",
                numbers={"items": len(messages), "limit": MAX_MESSAGES},
            )
        wish = AnswerWish(
            *(tools, variables, forced_name(asked.tool_choice), asked.structure()),
            single=asked.parallel_tool_calls is False,
            last=messages[-1] if messages else None,
        )
        plan = plan_of(parts.tokenizer, parts.config, wish)
        said = await in_pieces(with_objects, [*asked.system_data(), *messages])
        conversation = await fitted_chat(parts.tokenizer, said, tools, variables)
        prompt = await chat_of(parts.tokenizer, conversation, tools, variables)
        if asked.truncation == "auto":
            prompt = prompt.fitted(asked.max_tokens)
        wanted = asked.to_generate(None, 0, plan)
        stored = StoredResponse(
            *(int(time.time()), plan.format, asked.metadata or {}, messages, asked.previous_response_id),
            asked=await asked.returned(),
        )
        if asked.wants_logprobs:
            wanted.logprobs, wanted.top_logprobs = True, asked.top_logprobs or 0
        (texts,) = asked.texts([prompt], parts.tokenizer)
        texts.keep = None if asked.store is False else partial(_pack, parts, stored, context.tenant)
        generate = partial(parts.sessions.generate, wanted, context, texts=texts)
        idle_s = parts.config.http_idle_s
        if asked.background and not asked.stream:
            return Answer(lambda reply: _begin(reply, stored, generate, running), idle_s)
        events = _events(parts, stored)
        made = LoggedEvents(events) if asked.wants_logprobs else events
        return answer_of_events(made, generate, context, idle_s, stream=bool(asked.stream))

    _add_reading(router, parts)
    _add_ending(router, parts)
    return router


def _add_reading(router: APIRouter, parts: HttpDependencies) -> None:
    @router.post("/v1/responses/input_tokens")
    async def count(asked: ResponseTokensRequest, request: Request) -> dict[str, Any]:
        """Tokens of the prompt that a response would have."""
        log_unknown(asked)
        parts.router.model(asked.model or "")
        tenant, tools, variables = context_of(request.scope).tenant, asked.tool_data(), asked.template_variables()
        before = await _conversation(parts, asked.previous_response_id, tenant) if asked.previous_response_id else []
        messages = [*asked.system_data(), *before, *await _messages(parts, asked.input, tenant)]
        said = await in_pieces(with_objects, messages)
        conversation = await fitted_chat(parts.tokenizer, said, tools, variables)
        tokens = await parts.tokenizer.encode_chat(conversation, tools, variables, tenant=tenant)
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    @router.get("/v1/responses/{name}")
    async def read(
        name: Name,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, lt=2**40)] = -1,
    ) -> Answer:
        """The response as it is, with `include` its log-probabilities too; or its events behind a number."""
        context, idle_s = context_of(request.scope), parts.config.http_idle_s
        session, stored = await _stored(parts, name, context.tenant)
        include = (*request.query_params.getlist("include"), *request.query_params.getlist("include[]"))
        if LOGPROBS in include:
            if stream:
                raise InvalidArgument(
                    "Events of a response that is read again have no log-probabilities; read it without stream.",
                    reason="FIELD_NOT_SERVED",
                    field="include",
                )
            written = await parts.sessions.events_so_far(session.key.id, context.tenant)
            events = await with_logprobs(parts, context, written, stored.asked.get("top_logprobs") or 0)
            logged = _present(LoggedEvents(_events(parts, stored)), stored, events)
            return Answer(lambda reply: reply.send_json(logged), idle_s)
        if stream:
            resume = partial(_resume, parts, session.key.id, context)
            return answer_of_events(_events(parts, stored, starting_after), resume, context, idle_s, stream=True)
        present = await _read(parts, session.key.id, stored, context.tenant)
        return Answer(lambda reply: reply.send_json(present), idle_s)

    @router.get("/v1/responses/{name}/input_items")
    async def read_input(
        name: Name,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
    ) -> dict[str, Any]:
        """The conversation up to the response, as items."""
        session, stored = await _stored(parts, name, context_of(request.scope).tenant)
        items = await input_items(session.key.id, stored.messages)
        return page_of(items[::-1] if order == "desc" else items, limit, after)


def _add_ending(router: APIRouter, parts: HttpDependencies) -> None:
    @router.delete("/v1/responses/{name}")
    async def delete(name: Name, request: Request) -> dict[str, Any]:
        """Ends the response, wherever it runs, and forgets it."""
        tenant = context_of(request.scope).tenant
        session, _ = await _stored(parts, name, tenant)
        await parts.sessions.delete(session.key.id, tenant)
        return {"id": name, "object": "response", "deleted": True}

    @router.post("/v1/responses/{name}/cancel")
    async def cancel(name: Name, request: Request) -> dict[str, Any]:
        """Ends the response, wherever it runs."""
        tenant = context_of(request.scope).tenant
        session, stored = await _stored(parts, name, tenant)
        await parts.sessions.cancel(session.key.id, tenant)
        return await _read(parts, session.key.id, stored, tenant)


async def _messages(parts: HttpDependencies, input: Input, tenant: Tenant) -> list[dict[str, Any]]:
    """The input as messages of a chat, with the items that it refers to. Raises NotFound for an item of no response
    that this tenant has stored, InvalidArgument for items of too many responses."""
    if isinstance(input, str):
        return [{"role": "user", "content": input}]
    references = await in_pieces(lambda item: item.reference, input)
    named = {name for name in references if name is not None}
    found = await in_pieces(lambda name: re.fullmatch(ITEM_ID, name), named)
    sessions = {each[1] for each in found if each}
    if len(sessions) > MAX_REFERRED:
        raise InvalidArgument(
            f"The input refers to items of {len(sessions)} responses; at most {MAX_REFERRED} are read.",
            reason=TOO_MANY_ITEMS,
            field="input",
            numbers={"items": len(sessions), "limit": MAX_REFERRED},
        )
    known = [item for session in sessions for item in await _items(parts, session, tenant)]
    by_id = {item.id: item for item in known}
    if missing := sorted(str(name) for name in named - by_id.keys()):
        raise NotFound(
            f"There is no item {missing[0][:128]!r}: its response was not stored, or expired. Send the item itself.",
            reason="NO_ITEM",
            field="input",
        )
    return await messages_of(
        item if name is None else by_id[name] for item, name in zip(input, references, strict=True)
    )


async def _items(parts: HttpDependencies, session_id: str, tenant: Tenant) -> list[InputItem]:
    """All items of a stored response, those of its input and its output; none where there is no such response."""
    try:
        _, stored = await _stored(parts, PREFIX + session_id, tenant)
        output = (await _read(parts, session_id, stored, tenant))["output"]
    except NotFound:
        return []
    items = [*await input_items(session_id, stored.messages), *output]
    return await in_pieces(InputItem.model_validate, items)


async def _read(parts: HttpDependencies, session_id: str, stored: StoredResponse, tenant: Tenant) -> dict[str, Any]:
    """The response as it is now, with what it has written where it still runs."""
    return _present(_events(parts, stored), stored, await parts.sessions.events_so_far(session_id, tenant))


def _present(made: ResponseEvents | LoggedEvents, stored: StoredResponse, events: Sequence[Event]) -> dict[str, Any]:
    begun = [each for event in events for each in made.read(event)]
    started = events[0]
    assert isinstance(started, gateway_pb2.Started)
    return made.whole() or _response(stored, started, output_so_far(begun), None)


async def _stored(
    parts: HttpDependencies, name: str, tenant: Tenant
) -> tuple[gateway_pb2.GetSessionResponse, StoredResponse]:
    """A response's session and what it keeps. Raises NotFound for one that is not stored, and another tenant's."""
    session, kept = await parts.sessions.describe_response(name.removeprefix(PREFIX), tenant)
    return session, await _unpack(parts, kept, tenant)


async def _pack(parts: HttpDependencies, stored: StoredResponse, tenant: Tenant) -> bytes:
    """Serialises the part that is kept with a response. Raises what `written` raises."""
    written = await stored.written(StoredLimits.of(parts.config.max_prompt_bytes))
    if len(written) < AT_ONCE:
        return zlib.compress(written)
    return bytes((await parts.work.run(tenant, "deflate", written)).body)


async def _unpack(parts: HttpDependencies, kept: bytes, tenant: Tenant) -> StoredResponse:
    """Raises what `read_stored` raises."""
    limits, written = StoredLimits.of(parts.config.max_prompt_bytes), inflated(kept, AT_ONCE)
    if len(written) <= AT_ONCE:
        return read_stored(written, limits)
    result = await parts.work.run(tenant, "inflate", kept, most=limits.size, most_values=limits.values)
    return stored_of(await put_together(result) if "sizes" in result.head else None)


async def _conversation(parts: HttpDependencies, name: str, tenant: Tenant) -> list[dict[str, Any]]:
    """The messages of a response's conversation, its output the last of them. Raises NotFound for a response that
    is not stored or another tenant's, FailedPrecondition for one that goes on."""
    try:
        if not re.fullmatch(RESPONSE_ID, name):
            raise NotFound("This is no response's id.", reason="NO_RESPONSE")
        session, stored = await _stored(parts, name, tenant)
        events = await parts.sessions.read_events(session.key.id, tenant)
    except NotFound as error:
        raise NotFound(
            "There is no such response: it was not stored, or expired. Send the whole conversation as input.",
            reason="PREVIOUS_RESPONSE_NOT_FOUND",
            field="previous_response_id",
        ) from error
    made = _events(parts, stored)
    for event in events:
        made.read(event)
    output = [InputItem.model_validate(item) for item in made.whole()["output"]]
    return [*stored.messages, *await messages_of(output)]


async def _resume(parts: HttpDependencies, session_id: str, context: RequestContext, send: Send) -> None:
    """Sends the session from its beginning."""
    request = gateway_pb2.ResumeRequest(session_id=session_id, offset=0, characters=0)
    await parts.sessions.resume(request, context, send)


async def _begin(reply: Reply, stored: StoredResponse, follow: Follow, running: set[asyncio.Task[None]]) -> None:
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
    await reply.send_json(_response(stored, began.result(), [], None))


def _response(
    stored: StoredResponse,
    started: gateway_pb2.Started,
    output: list[dict[str, Any]],
    finished: gateway_pb2.Finished | None,
) -> dict[str, Any]:
    status, incomplete = _status(finished)
    record = {
        "id": PREFIX + started.session_id,
        "object": "response",
        "created_at": stored.created_at,
        "status": status,
        "model": started.model,
        "output": output,
        "error": None,
        "incomplete_details": incomplete,
        "metadata": stored.metadata,
        "previous_response_id": stored.previous_response_id,
        **UNASKED,
        **{name: value for name, value in stored.asked.items() if value is not None},
        "usage": None if finished is None else _usage(started, finished),
    }
    if finished is None:
        return record
    if metrics := speculation_metrics(finished.statistics):
        record["metrics"] = metrics
    return record | mixture(finished.statistics)


def _events(parts: HttpDependencies, stored: StoredResponse, after: int = -1) -> ResponseEvents:
    return ResponseEvents(AnswerPlan(stored.format, parts.tokenizer), partial(_response, stored), after)


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
        "output_tokens_details": {"reasoning_tokens": 0} | accepted_and_rejected([finished.statistics]),
        "total_tokens": prompt + output,
    }


@dataclass(frozen=True, slots=True)
class StoredLimits:
    """The size of what a response keeps, as JSON before it is compressed: 16 kB can be a thousand times as much."""

    size: int
    """Most bytes."""
    values: int
    """Most commas and brackets: a value that is parsed takes many times the bytes that it has in JSON."""

    @classmethod
    def of(cls, prompt_bytes: int) -> StoredLimits:
        """For conversations whose text has at most so many bytes: it may be quotes and commas only, and each of
        MAX_MESSAGES may be a call."""
        return cls(2 * prompt_bytes + 128 * MAX_MESSAGES, prompt_bytes + 16 * MAX_MESSAGES)

    def hold(self, written: bytes) -> bool:
        return len(written) <= self.size and sum(map(written.count, (b",", b"[", b"{"))) <= self.values


def _from_name(value: Any) -> Any:
    """Earlier records have the name of the calls' format alone."""
    return {"calls": value} if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Data that a response leaves for later requests, in the record of its session, where no client can write it: any
    gateway of the store reads it, for the session's own tenant, until the record expires."""

    created_at: int
    """Unix seconds."""
    format: Annotated[AnswerFormat, BeforeValidator(_from_name)]
    """Format in which the output is read."""
    metadata: dict[str, str]
    messages: list[dict[str, Any]]
    """The conversation up to the output, as messages of a chat with the arguments of calls as they were sent, without
    instructions. Of earlier versions the arguments are parsed."""
    previous_response_id: str | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    """Fields of its request that the response repeats."""

    async def written(self, limits: StoredLimits) -> bytes:
        """As JSON. Raises InvalidArgument for a conversation above the limits."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"format": asdict(self.format)}
        written = await json_in_pieces(values, ascii=False)
        if not limits.hold(written):
            raise InvalidArgument(
                f"The conversation is above {limits.size} bytes or {limits.values} commas and brackets; begin another "
                "one, or send store: false.",
                reason="CONVERSATION_TOO_LONG",
                field="input",
            )
        return written


_READER = TypeAdapter(StoredResponse)


def read_stored(written: bytes, limits: StoredLimits) -> StoredResponse:
    """Raises NotFound for a session that is no response, and for more than the limits before anything is parsed."""
    try:
        return stored_of(json.loads(written) if limits.hold(written) else None)
    except (ValueError, RecursionError):  # without what was read, which may be anybody's text
        raise NotFound("There is no such response.", reason="NO_RESPONSE") from None


def stored_of(value: Any) -> StoredResponse:
    """Raises NotFound for a value that is no response's."""
    try:
        messages = value["messages"]
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise ValueError("no messages")
        return replace(_READER.validate_python({**value, "messages": []}), messages=messages)
    except (ValueError, KeyError, TypeError):
        raise NotFound("There is no such response.", reason="NO_RESPONSE") from None
