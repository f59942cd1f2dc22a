"""The body of an HTTP request: read within limits of size, time and memory, and forgotten once it is parsed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.api.http.errors import RequestTimeout, RequestTooLarge
from slipstream.errors import InvalidArgument, Unavailable

SMALL_BYTES = 65_536
"""Bodies up to this size are read however many others are."""
KEY_BYTES = 6
"""Bytes of a key and its value in a text of JSON, at least: `"a":1,`. A prompt that is such a text is not refused."""
LARGE_BODIES = 4
"""Bodies of the largest size that are read and parsed at a time."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHARE = "slipstream.body_share"


class Left(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    bytes: int
    """Most bytes of a body."""
    values: int
    """Most commas and brackets in a body: each value of parsed JSON takes many times the bytes that were sent. Keys of
    objects take most time to parse: a body has as many as fit into a text of this size at most, one in KEY_BYTES."""
    idle_s: float
    """Seconds that a client has to send its body."""


class BodyReader:
    """Reads the bodies of all requests."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._most_held = LARGE_BODIES * limits.bytes
        self.held_bytes = 0
        """Bytes of large bodies that were received and not parsed yet."""

    async def read(
        self, scope: MutableMapping[str, Any], declared: str, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
    ) -> bytes:
        """The whole body. `declared`: its header content-length. Raises RequestTooLarge before more than the limit is
        held, Unavailable where other bodies take all memory, RequestTimeout, InvalidArgument, and Left."""
        most, share = self._limits.bytes, _Share(self)
        scope["state"][_SHARE] = share
        if declared.isdecimal() and int(declared[:20]) > most:
            raise _too_large(most)
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._limits.idle_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Left
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    share.grow_to(size, self._most_held)
                    parts.append(part)
        except TimeoutError as error:
            raise RequestTimeout(f"The body did not arrive within {self._limits.idle_s:g} s.") from error
        body = b"".join(parts)
        self._check_values(body)
        _check_unicode(body)
        return body

    def _check_values(self, body: bytes) -> None:
        most = self._limits.values
        if len(body) <= most:
            return
        if sum(map(body.count, (b",", b"[", b"{"))) > most:
            raise RequestTooLarge(
                f"The body has more than {most} commas and brackets; send fewer values.", reason="TOO_MANY_VALUES"
            )
        if min(body.count(b":"), body.count(b'"') // 2) > most // KEY_BYTES:  # no key does without
            raise RequestTooLarge(
                f"The objects of the body have more than {most // KEY_BYTES} keys; send fewer.",
                reason="TOO_MANY_VALUES",
            )


class _Share:
    """What one request's body takes of the memory for all."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self._size = 0

    def grow_to(self, size: int, most: int) -> None:
        if size <= SMALL_BYTES:
            return
        more = size - self._size
        if self._reader.held_bytes + more > most:
            raise Unavailable("Too many large requests arrive at once; try again.", reason="BODIES")
        self._reader.held_bytes += more
        self._size = size

    def give_back(self) -> None:
        self._reader.held_bytes -= self._size
        self._size = 0


def give_back(scope: MutableMapping[str, Any]) -> None:
    """The request's body is parsed, or refused: others may take its memory."""
    share = scope["state"].get(_SHARE)
    if share is not None:
        share.give_back()


class BodyRoute(APIRoute):
    """A route whose requests forget their bodies once they are parsed: an answer may take long."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_and_forget(request: Request) -> Response:
            try:
                return await handle(request)
            finally:
                for name in ("_body", "_json"):
                    vars(request).pop(name, None)
                give_back(request.scope)

        return handle_and_forget


def _check_unicode(body: bytes) -> None:
    """Raises InvalidArgument for half a character, which JSON can write and UTF-8 cannot."""
    if _SURROGATE.search(body):
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("The request holds text that is not Unicode: a lone surrogate.") from error
        except (ValueError, RecursionError):  # no JSON: refused where it is parsed
            pass


def _too_large(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is above {most} bytes; send a shorter one.", reason="BODY_TOO_LARGE")
