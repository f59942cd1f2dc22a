"""A large body in JSON, taken apart in a working process, and put together again on the event loop.

What takes long to parse are escapes, numbers and very many values. A working process takes long texts and lists of
token ids out of the value, which the gateway gets as bytes, bounds what is left, and cuts long lists of it, such as
messages, into pieces between which other requests have their turn.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator
from typing import Any

from gateway.work.frames import Buffer, JobFrame

LONG = 256
"""Characters of a text, or elements of a list of token ids, from which on it is taken out."""
MOST_VALUES = 131_072
"""Most commas and brackets of what is left: some 20 ms of parsing and checking, in pieces."""
MOST_OF_ONE = 16_384
"""Most values of one element of the body's lists, of the rest of it, and of a call's arguments: 3 ms."""
PIECE_VALUES = 1024
"""Values of a piece of a list, if it is not one element."""
FEW = 16
"""Elements of a list that is not cut."""
ARGUMENTS = "arguments"
"""Fields whose texts are themselves JSON, which the gateway reads."""
KEY_BYTES = 6
"""Bytes of a key and its value in a text of JSON, at least: `"a":1,`. A prompt that is such a text is not refused."""
IDS = "I"
"""Type of an array of token ids: 32 bits without a sign."""
_MOST_ID = 2**32 - 1
_LISTS_OF_IDS = ("prompt", "tokens")
"""Fields with token ids, or with lists of them."""
_Place = tuple[str | int, ...]
_Taken = tuple[_Place, str, bytes]
_Sizes = tuple[str | None, int, int, int]
"""Name of the list that a piece is of, None for the rest; bytes of the piece, of what says what was taken out of it
from where, and of that."""


def too_many_values(body: Buffer, most: int) -> str:
    """A sentence about a body with more than `most` commas and brackets, or with more keys than fit into so many bytes;
    empty for any other. Each value of parsed JSON takes many times the bytes that were sent, and each key most of the
    time."""
    if len(body) <= most:
        return ""
    text = bytes(body)
    if sum(map(text.count, (b",", b"[", b"{"))) > most:
        return f"The body has more than {most} commas and brackets; send fewer values."
    if min(text.count(b":"), text.count(b'"') // 2) > most // KEY_BYTES:  # no key does without
        return f"The objects of the body have more than {most // KEY_BYTES} keys; send fewer."
    return ""


def take_apart(body: Buffer, most_values: int, most_left: int = MOST_VALUES) -> JobFrame:
    """The rest of a body's value as JSON in pieces, each with what was taken out of it behind it. `not_json`: the fault
    and its place, where it is no JSON; `values`: a sentence, where there are too many, or more than `most_left` are
    left; `surrogate`: true where a text is no Unicode."""
    if fault := too_many_values(body, most_values):
        return JobFrame({"values": fault})
    sizes, contents, rests = list[_Sizes](), list[bytes](), list[bytes]()
    try:
        for name, value, taken in _pieces(json.loads(bytes(body))):
            rest = json.dumps(value, ensure_ascii=False).encode()
            places = json.dumps([(place, kind, len(content)) for place, kind, content in taken]).encode()
            rests.append(rest)
            sizes.append((name, len(rest), len(places), sum(len(content) for _, _, content in taken)))
            contents += (rest, places, *(content for _, _, content in taken))
    except _TooManyError as error:
        return JobFrame({"values": f"{error} of the body has more than {MOST_OF_ONE} values; send fewer."})
    except json.JSONDecodeError as error:
        return JobFrame({"not_json": [error.msg, error.pos]})
    except UnicodeEncodeError:
        return JobFrame({"surrogate": True})
    except ValueError:  # not in UTF-8, or a number of very many digits
        return JobFrame({"unreadable": True})
    if fault := too_many_values(b"".join(rests), most_left):
        return JobFrame({"values": fault})
    return JobFrame({"sizes": sizes}, b"".join(contents))


async def put_together(result: JobFrame) -> Any:
    """The body's value. Long lists of token ids are arrays of them."""
    whole: Any = None
    view, begin = memoryview(result.body), 0
    for name, *sizes in result.head["sizes"]:
        parts = []
        for size in sizes:
            parts.append(bytes(view[begin : begin + size]))
            begin += size
        rest, places, taken = parts
        value = json.loads(rest)
        if name is None:
            whole = value
        else:
            whole[name] += value
            await asyncio.sleep(0)
        whole = _filled(whole, json.loads(places), taken)
    return whole


def _filled(whole: Any, places: list[tuple[list[str | int], str, int]], taken: bytes) -> Any:
    """The value with what was taken out of these places."""
    begin = 0
    for place, kind, size in places:
        content, begin = taken[begin : begin + size], begin + size
        made: Any = str(content, "utf-8") if kind == "text" else array(IDS, content)
        if not place:
            return made
        parent = whole
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = made
    return whole


class _TooManyError(Exception):
    """The body has too many values."""


def _pieces(value: Any) -> Iterator[tuple[str | None, Any, list[_Taken]]]:
    """The value without its long lists, and then pieces of these, with their names; what was taken out of each."""
    cut = {name: each for name, each in value.items() if _is_cut(name, each)} if isinstance(value, dict) else {}
    taken: list[_Taken] = []
    others = {name: [] if name in cut else each for name, each in value.items()} if cut else value
    rest = _without_long(others, (), taken)
    if _count(rest) > MOST_OF_ONE:
        raise _TooManyError("What is no long list")
    yield None, rest, taken
    for name, elements in cut.items():
        piece, taken, size = list[Any](), list[_Taken](), 0
        for index, element in enumerate(elements):
            one = _without_long(element, (name, index), taken)
            values = _count(one)
            if values > MOST_OF_ONE:
                raise _TooManyError(f"{name}.{index}")
            piece.append(one)
            size += values
            if size > PIECE_VALUES:
                yield name, piece, taken
                piece, taken, size = [], [], 0
        if piece:
            yield name, piece, taken


def _is_cut(name: str, value: Any) -> bool:
    return isinstance(value, list) and len(value) > FEW and not (name in _LISTS_OF_IDS and _are_ids(value))


def _count(value: Any) -> int:
    """Values within this one, and itself."""
    found, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        found += 1
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return found


def _without_long(value: Any, place: _Place, taken: list[_Taken]) -> Any:
    if isinstance(value, str) and len(value) >= LONG:
        if place and place[-1] == ARGUMENTS and _count(_parsed(value)) > MOST_OF_ONE:
            raise _TooManyError("The arguments of a call")
        taken.append((place, "text", value.encode()))
        return None
    if isinstance(value, dict):
        return {name: _without_long(each, (*place, name), taken) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) >= LONG and place and place[0] in _LISTS_OF_IDS and _are_ids(value):
        taken.append((place, "ids", array(IDS, value).tobytes()))
        return None
    return [_without_long(each, (*place, index), taken) for index, each in enumerate(value)]


def _parsed(text: str) -> Any:
    """None for what is no JSON, which is refused where it is read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _are_ids(values: list[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= _MOST_ID
