"""The body of an HTTP request: read within limits of size, time and memory, and forgotten once it is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from gateway.api.http.errors import RequestTimeout, RequestTooLarge
from gateway.auth.tenant import Tenant
from gateway.text.json_body import put_together, too_many_values
from gateway.work.pieces import in_pieces
from gateway.work.tenant_work import TenantWork
from slipstream.errors import NOT_UNICODE, InvalidArgument, Unavailable

SMALL_BYTES = 65_536
"""Bodies up to this size are read however many others are, and parsed on the event loop, if they are texts rather than
very many values."""
SMALL_VALUES = 1024
"""Most commas and brackets of such a body: parsing and checking them takes some 1 ms."""
WATCHED_BYTES = 2048
"""A client whose body is larger may have work done that takes long, which ends when it leaves."""
LEFT = 499
"""Status of what is not sent, for the client has left."""
LARGE_BODIES = 4
"""Bodies of the largest size that are read and parsed at a time."""
LARGE_OF_ONE = 2
"""As many of them are one tenant's."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHARE = "slipstream.body_share"
_READER = "slipstream.body_reader"
_JSON = re.compile(r"application/([^;]*\+)?json\b", re.IGNORECASE)


class Left(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    bytes: int
    """Most bytes of a body."""
    values: int
    """Most commas and brackets in a body, and bytes of its keys (`too_many_values`)."""
    idle_s: float
    """Seconds that a client has to send its body."""


MostBytes = Callable[[str, Tenant], int]
"""Path of a request, and whose it is -> most bytes that its body may have."""


class BodyReader:
    """Reads the bodies of all requests."""

    def __init__(self, limits: BodyLimits, work: TenantWork, most_bytes: MostBytes) -> None:
        """`limits`: for all callers. `work`: parses large bodies. `most_bytes`: what the caller's own limits leave."""
        self._limits = limits
        self._work = work
        self._most_bytes = most_bytes
        self._most_held = LARGE_BODIES * limits.bytes
        self._most_of_one = LARGE_OF_ONE * limits.bytes
        self.held_bytes = 0
        """Bytes of large bodies that were received and not parsed yet."""
        self._held_of: Counter[str] = Counter()
        """As many of them by tenant."""

    async def read(
        self,
        scope: MutableMapping[str, Any],
        tenant: Tenant,
        declared: str,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    ) -> bytes:
        """The whole body. `declared`: its header content-length. Raises RequestTooLarge before more than the limit is
        held, Unavailable where other bodies take all memory, RequestTimeout, InvalidArgument, and Left."""
        most, share = min(self._limits.bytes, self._most_bytes(scope["path"], tenant)), _Share(self, tenant)
        scope["state"] |= {_SHARE: share, _READER: self}
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
                    share.grow_to(size)
                    parts.append(part)
        except TimeoutError as error:
            raise RequestTimeout(
                f"The body did not arrive within {self._limits.idle_s:g} s.", reason="BODY_TIMEOUT"
            ) from error
        body = b"".join(parts)
        if size <= SMALL_BYTES:
            self._check_small(body)
        return body

    def _check_small(self, body: bytes) -> None:
        """The checks of a small body that `parse` makes of a large one."""
        if fault := too_many_values(body, self._limits.values):
            raise RequestTooLarge(fault, reason="TOO_MANY_VALUES")
        _check_unicode(body)

    async def parse(self, body: bytes, tenant: Tenant) -> Any:
        """The value of a large body in JSON. Raises RequestTooLarge, InvalidArgument, RequestValidationError for what
        is no JSON, and what `TenantWork.run` raises."""
        result = await self._work.run(tenant, "body", body, most_values=self._limits.values)
        if fault := result.head.get("values"):
            raise RequestTooLarge(fault, reason="TOO_MANY_VALUES")
        if result.head.get("surrogate"):
            raise _no_unicode()
        if result.head.get("unreadable"):
            raise InvalidArgument("The body cannot be read; send JSON.", reason="NOT_JSON")
        if fault := result.head.get("not_json"):  # as the framework reports it
            what, place = fault
            error = {"type": "json_invalid", "loc": ("body", place), "msg": "", "input": {}, "ctx": {"error": what}}
            raise RequestValidationError([error])
        return await put_together(result)

    def grow(self, tenant: str, more: int) -> None:
        """Raises Unavailable where a tenant's large bodies, or all, would take too much memory."""
        over = self._held_of[tenant] + more > self._most_of_one
        if over or self.held_bytes + more > self._most_held:
            raise Unavailable("Too many large requests arrive at once; try again.", reason="BODIES")
        self.shrink(tenant, -more)

    def shrink(self, tenant: str, less: int) -> None:
        self.held_bytes -= less
        self._held_of[tenant] -= less
        self._held_of += Counter()  # drops those that hold nothing


class _Share:
    """Part of the memory for all bodies that one request's body takes."""

    def __init__(self, reader: BodyReader, tenant: Tenant) -> None:
        self._reader = reader
        self.tenant = tenant
        self._size = 0

    def grow_to(self, size: int) -> None:
        if size > SMALL_BYTES:
            self._reader.grow(self.tenant.name, size - self._size)
            self._size = size

    def give_back(self) -> None:
        self._reader.shrink(self.tenant.name, self._size)
        self._size = 0


def give_back(scope: MutableMapping[str, Any]) -> None:
    """The request's body is parsed, or refused: others may take its memory."""
    share = scope["state"].get(_SHARE)
    if share is not None:
        share.give_back()


class BodyRoute(APIRoute):
    """A route whose requests forget their bodies once they are parsed: an answer may take long."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle, elements = super().get_route_handler(), elements_of(self.endpoint)

        async def handle_and_forget(request: Request) -> Response:
            try:
                if len(await request.body()) < WATCHED_BYTES:
                    return await handle(request)
                return await _while_connected(request, _handle_large(request, handle, elements))
            finally:
                for name in ("_body", "_json"):
                    vars(request).pop(name, None)
                give_back(request.scope)

        return handle_and_forget


async def _handle_large(
    request: Request, handle: Callable[[Request], Awaitable[Response]], elements: Elements
) -> Response:
    """Parse a large body in a working process; the route then finds its value."""
    reader, body = request.scope["state"].get(_READER), await request.body()
    if reader is not None and not _is_small(body) and _JSON.match(request.headers.get("content-type", "")):
        value = await reader.parse(body, request.scope["state"][_SHARE].tenant)
        request._json = await with_checked_elements(value, elements)
    return await handle(request)


def _is_small(body: bytes) -> bool:
    return len(body) <= SMALL_BYTES and not too_many_values(body, SMALL_VALUES)


Elements = Mapping[str, type[BaseModel]]
"""Models of the elements of a body's lists, by the field's name."""


def elements_of(endpoint: Callable[..., Any]) -> Elements:
    """Those of the body that a route takes."""
    given = [each for each in get_type_hints(endpoint).values() if isinstance(each, type)]
    [body] = [each for each in given if issubclass(each, BaseModel)] or [BaseModel]
    found = {name: _element(field.annotation) for name, field in body.model_fields.items()}
    return {name: element for name, element in found.items() if element is not None}


def _element(kind: Any) -> type[BaseModel] | None:
    """The model of a list's elements; None where nothing of this type is a list of models."""
    within = get_args(kind)
    if get_origin(kind) is list:
        return within[0] if isinstance(within[0], type) and issubclass(within[0], BaseModel) else None
    return next(filter(None, map(_element, within)), None)


async def with_checked_elements(value: Any, elements: Elements) -> Any:
    """The body with its lists' elements checked one by one, up to the first that is wrong: checking the whole, which
    happens at once, takes them as they are."""
    for name, model in elements.items():
        given = value.get(name) if isinstance(value, dict) else None
        if isinstance(given, list):
            with contextlib.suppress(ValidationError):
                value[name] = await in_pieces(model.model_validate, given)
    return value


async def _while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that is to be sent; work on it ends when the client has left."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=LEFT)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])


def _check_unicode(body: bytes) -> None:
    """Raises InvalidArgument for half a character, which JSON can write and UTF-8 cannot."""
    if _SURROGATE.search(body):
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _no_unicode() from error
        except (ValueError, RecursionError):  # no JSON: refused where it is parsed
            pass


def _no_unicode() -> InvalidArgument:
    return InvalidArgument("The request holds text that is not Unicode: a lone surrogate.", reason=NOT_UNICODE)


def _too_large(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is above {most} bytes; send a shorter one.", reason="BODY_TOO_LARGE")
