"""Answers of protocols whose streams consist of named events: what the events say, they say whole at the end."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from gateway.api.http.reply import Answer, Reply, trace_headers
from gateway.request_context import RequestContext
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import Send

Follow = Callable[[Send], Awaitable[None]]
"""Sends the events of a session."""


class EventMaker(Protocol):
    def read(self, event: Event) -> list[dict[str, Any]]:
        """The protocol's events that an event of the session causes; each has its name as `type`."""

    def whole(self) -> dict[str, Any]:
        """The answer as one object, once the session has ended."""


def answer(made: EventMaker, follow: Follow, context: RequestContext, idle_s: float, *, stream: bool) -> Answer:
    """The events of a session as `made` writes them, one by one or as the whole answer."""

    async def send_events(reply: Reply) -> None:
        async def send(event: Event) -> None:
            for each in made.read(event):
                await reply.send_event(json.dumps(each), name=each["type"])

        await follow(send)
        await reply.end_events()

    async def send_whole(reply: Reply) -> None:
        async def read(event: Event) -> None:
            made.read(event)

        await follow(read)
        await reply.send_json(made.whole(), trace_headers(context.trailers))

    return Answer(send_events if stream else send_whole, idle_s)
