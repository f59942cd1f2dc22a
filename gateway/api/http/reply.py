"""The answer to a request that runs sessions: JSON, or server-sent events, for as long as the client is connected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.responses import Response

from gateway.api.http.entry import Message, Receive, Scope, SendMessage, context_of
from gateway.api.http.errors import http_error
from gateway.request_context import RequestContext
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import Send
from gateway.work.pieces import json_in_pieces
from slipstream.client.completion import TRACE_ID

log = logging.getLogger(__name__)

ABORT = "slipstream.abort"
"""Extension of an ASGI scope: a function that closes the connection at once, without sending what waits."""
PING = b": ping\n\n"
PING_S = 15.0
"""Seconds of silence after which a comment keeps the connection open: some load tools break on comments."""
_EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


class Reply:
    """Sends one answer. The first of `send_json` and `send_event` decides its kind; an error before is a status."""

    def __init__(self, scope: Scope, send: SendMessage) -> None:
        self._scope = scope
        self._send = send
        self.started = self.streaming = False
        self.wrote_at = time.monotonic()
        """Monotonic seconds at which the last write began."""
        self.writing = False
        """True while a write waits for the client to read."""

    async def send_json(self, content: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        body = await json_in_pieces(content)
        sent = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        sent += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.started = True
        await self._write({"type": "http.response.start", "status": status, "headers": sent})
        await self._write({"type": "http.response.body", "body": body})

    async def send_event(self, data: str, name: str = "", id: str = "") -> None:
        """Send `data`, one line, as an event. `id`: what a client that reconnects sends as Last-Event-ID."""
        lines = (f"event: {name}\n" if name else "") + (f"id: {id}\n" if id else "") + f"data: {data}\n\n"
        await self._send_part(lines.encode())

    async def end_events(self) -> None:
        """End the stream, which may have had no event."""
        await self._start_stream()
        self.streaming = False
        await self._write({"type": "http.response.body", "body": b""})

    async def ping(self) -> None:
        """Send a comment, which clients ignore."""
        await self._send_part(PING)

    async def fail(self, error: Exception) -> None:
        """Send the error: as a status, or as the last event."""
        answer = http_error(error, self._scope)
        if not self.started:
            await self.send_json(answer.body, answer.headers | self._trace(), answer.status)
            return
        await self.send_event(json.dumps(answer.body), "error" if answer.body.get("type") == "error" else "")
        await self.end_events()

    async def _send_part(self, part: bytes) -> None:
        await self._start_stream()
        await self._write({"type": "http.response.body", "body": part, "more_body": True})

    async def _start_stream(self) -> None:
        if not self.started:
            self.started = self.streaming = True
            headers = [*_EVENT_HEADERS, *((name.encode(), value.encode()) for name, value in self._trace().items())]
            await self._write({"type": "http.response.start", "status": 200, "headers": headers})

    def _trace(self) -> dict[str, str]:
        return trace_headers(context_of(self._scope).trailers)

    async def _write(self, message: Message) -> None:
        self.wrote_at, self.writing = time.monotonic(), True
        await self._send(message)
        self.writing = False


Work = Callable[[Reply], Awaitable[None]]


class Answer(Response):
    """Does `work` for as long as the client is connected and reads; an exception of it is sent as an error."""

    def __init__(self, work: Work, idle_s: float) -> None:
        """`idle_s`: seconds after which a client that does not take what is written is left."""
        super().__init__()
        self._work = work
        self._idle_s = idle_s

    async def __call__(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        reply = Reply(scope, send)
        working = asyncio.create_task(self._guarded(reply))
        watching = asyncio.create_task(self._watch(reply))
        leaving = asyncio.create_task(_disconnected(receive))
        tasks = (working, watching, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                log.info("a client took nothing for %g s; its connection is closed", self._idle_s)
                scope["extensions"][ABORT]()
        finally:
            # A client that left: `SessionRegistry._send_events`, which `work` awaits, then stops the session.
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not working.cancelled():
            working.result()

    async def _guarded(self, reply: Reply) -> None:
        try:
            await self._work(reply)
        except Exception as error:
            await reply.fail(error)

    async def _watch(self, reply: Reply) -> None:
        """Ping after silence; return for a client that does not read."""
        while True:
            await asyncio.sleep(min(PING_S, self._idle_s) / 2)
            silent_s = time.monotonic() - reply.wrote_at
            if reply.writing and silent_s > self._idle_s:
                return
            if reply.streaming and not reply.writing and silent_s > PING_S:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_s):
                        await reply.ping()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def trace_headers(trailers: dict[str, str]) -> dict[str, str]:
    """The headers of an answer whose request's trace is known: from the beginning where it is sampled, else at its end,
    behind the headers of a stream."""
    return {TRACE_ID: trailers[TRACE_ID]} if TRACE_ID in trailers else {}


Follow = Callable[[Send], Awaitable[None]]
"""Sends the events of a session."""


class EventMaker(Protocol):
    def read(self, event: Event) -> list[dict[str, Any]]:
        """The protocol's events that an event of the session causes; each has its name as `type`."""

    def whole(self) -> dict[str, Any]:
        """The answer as one object, once the session has ended."""


def answer_of_events(
    made: EventMaker, follow: Follow, context: RequestContext, idle_s: float, *, stream: bool
) -> Answer:
    """For protocols whose streams consist of named events: a session's events as `made` writes them, one by one, or all
    that they send as one object at the end."""

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
