"""The sessions behind one request: one for each choice, all admitted before anything is sent, or none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.request_context import RequestContext
from gateway.requests.texts import Texts
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import SessionRegistry
from slipstream.errors import InvalidArgument
from slipstream.rpc.proto_conversion import MAX_ID_CHARACTERS
from slipstream.v1 import gateway_pb2

MOST_CHOICES = 128
"""Most sessions of one request."""
LAST_EVENT_ID = "last-event-id"
EVENT_IDS = "x-event-ids"
"""Header, or query parameter `event_ids`, with which a client asks for events with ids."""
_POSITION = re.compile(rf"([\x21-\x39\x3b-\x7e]{{1,{MAX_ID_CHARACTERS}}}):([0-9]{{1,9}}):([0-9]{{1,9}}):([0-9]{{1,9}})")

OnEvent = Callable[[int, Event], Awaitable[None]]
"""Takes an event of the choice with this index."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position of a client in a session's output, as an event's id carries it."""

    session_id: str
    tokens: int
    characters: int
    revision: int

    def __str__(self) -> str:
        return f"{self.session_id}:{self.tokens}:{self.characters}:{self.revision}"


def last_position(context: RequestContext) -> StreamPosition | None:
    """The position in the header Last-Event-ID; None without one. Raises InvalidArgument for anything else in it."""
    given = context.header(LAST_EVENT_ID)
    if not given:
        return None
    found = _POSITION.fullmatch(given)
    if found is None:
        raise InvalidArgument(
            "Last-Event-ID is no id of this gateway's events; send the last one as it came.", reason="EVENT_ID"
        )
    session_id, *numbers = found.groups()
    return StreamPosition(session_id, *map(int, numbers))


def wants_ids(context: RequestContext, query: Mapping[str, str]) -> bool:
    """Whether the client asks for ids, which some clients of streams cannot read."""
    return "true" in (context.header(EVENT_IDS).lower(), query.get("event_ids", "").lower())


ALL_AT_ONCE = 2**31
"""Stream interval of an answer that is sent at its end, in tokens: above every session's length."""


@dataclass(slots=True)
class Choice:
    """Output of a session so far."""

    index: int
    started: gateway_pb2.Started = field(default_factory=gateway_pb2.Started)
    finished: gateway_pb2.Finished | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[gateway_pb2.Logprob] = field(default_factory=list)
    rounds: list[gateway_pb2.RoundDetails] = field(default_factory=list)
    prompt_logprobs: list[gateway_pb2.Logprob] = field(default_factory=list)
    """One for each of the prompt's tokens but the first, where they were asked for."""

    def add(self, event: Event) -> None:
        if isinstance(event, gateway_pb2.Delta):
            self.text += event.text
            self.token_ids += event.token_ids
            self.logprobs += event.logprobs
            self.rounds += event.rounds
            self.prompt_logprobs += event.prompt_logprobs
        elif isinstance(event, gateway_pb2.Finished):
            self.finished = event
        else:
            self.started = event


async def run_choices(
    sessions: SessionRegistry,
    context: RequestContext,
    requests: Sequence[gateway_pb2.GenerateRequest],
    texts: Sequence[Texts],
    on_event: OnEvent,
) -> None:
    """Run a session for each request, written from the texts at the same index. No event is passed on before all of
    them were admitted. Raises what SessionRegistry.generate raises; the other sessions are let go then."""
    admitted = asyncio.Barrier(len(requests))

    async def run(index: int) -> None:
        async def send(event: Event) -> None:
            if isinstance(event, gateway_pb2.Started):
                await admitted.wait()
            await on_event(index, event)

        await sessions.generate(requests[index], context, send, texts=texts[index])

    await _all(run, len(requests))


async def collect_choices(
    sessions: SessionRegistry,
    context: RequestContext,
    requests: Sequence[gateway_pb2.GenerateRequest],
    texts: Sequence[Texts],
) -> list[Choice]:
    """Run a session for each request, and return their whole outputs."""
    choices = [Choice(index) for index in range(len(requests))]
    for request in requests:
        request.stream_interval = ALL_AT_ONCE

    async def add(index: int, event: Event) -> None:
        choices[index].add(event)

    await run_choices(sessions, context, requests, texts, add)
    return choices


async def resume_choice(
    sessions: SessionRegistry,
    context: RequestContext,
    position: StreamPosition,
    on_event: OnEvent,
    mixed_arithmetic: bool | None = None,
) -> None:
    """Pass on what is missing behind the position. `mixed_arithmetic`: as in ResumeRequest. Raises what
    SessionRegistry.resume raises."""
    request = gateway_pb2.ResumeRequest(
        session_id=position.session_id,
        offset=position.tokens,
        characters=position.characters,
        revision=position.revision,
        mixed_arithmetic=mixed_arithmetic,
    )

    async def send(event: Event) -> None:
        await on_event(0, event)

    await sessions.resume(request, context, send)


async def _all(run: Callable[[int], Awaitable[None]], count: int) -> None:
    """Run all; the first error ends the others and is raised alone."""
    if count == 1:
        await run(0)
        return
    tasks = [asyncio.ensure_future(run(index)) for index in range(count)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
