"""Work on the event loop whose length a client decides, in pieces of a millisecond: between two of them other requests
have their turn (`gateway.auth.loop_turns`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from time import perf_counter
from typing import Any, TypeVar

PIECE_S = 0.001
PIECE_TOKENS = 8192
"""So many tokens are copied or looked through in a fraction of a millisecond."""
SHORT = 2048
"""Shorter texts, in characters, are encoded on the event loop: that takes 1 ms, and another process one more. To write
a value of so many characters and entries as JSON takes some 0.1 ms."""
T = TypeVar("T")
R = TypeVar("R")


async def give_way(tokens: int) -> None:
    """Let others have their turn between two steps that each touch so many tokens, if those are many."""
    if tokens > PIECE_TOKENS:
        await asyncio.sleep(0)


async def in_pieces(make: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results of `make` for each item."""
    made, ends = list[R](), perf_counter() + PIECE_S
    for item in items:
        made.append(make(item))
        if perf_counter() >= ends:
            await asyncio.sleep(0)
            ends = perf_counter() + PIECE_S
    return made


async def json_in_pieces(value: Any, *, ascii: bool = True) -> bytes:
    """The value as `json.dumps` writes it. `ascii`: with escapes for all other characters. Raises what it raises."""
    parts = await in_pieces(lambda part: part, _json_parts(value, ascii))
    return "".join(parts).encode()


def is_short(value: Any) -> bool:
    """Whether a value has less than SHORT characters and entries. Looks at no more of them."""
    left, waiting = SHORT, [value]
    while waiting and left > 0:
        each = waiting.pop()
        if isinstance(each, str):
            left -= len(each)
        elif isinstance(each, Mapping):
            for name, inner in islice(each.items(), SHORT):
                waiting += (name, inner)
        elif isinstance(each, list | tuple):
            waiting += each[:SHORT]
        left -= 1
    return left > 0


def _json_parts(value: Any, ascii: bool) -> Iterable[str]:
    if not isinstance(value, dict | list | tuple) or is_short(value):
        yield json.dumps(value, ensure_ascii=ascii)
    elif isinstance(value, dict):
        for index, (name, each) in enumerate(value.items()):
            yield f"{', ' if index else '{'}{json.dumps({name: 0}, ensure_ascii=ascii)[1:-2]}"
            yield from _json_parts(each, ascii)
        yield "}"
    else:
        for index, each in enumerate(value):
            yield ", " if index else "["
            yield from _json_parts(each, ascii)
        yield "]"
