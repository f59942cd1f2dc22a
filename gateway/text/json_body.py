"""A large body in JSON, taken apart in a working process, and put together again on the event loop.

What takes long to parse are escapes, numbers and very many values. A working process takes long texts and lists of
token ids out of the value, which the gateway gets as bytes, and bounds what is left.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from gateway.work.frames import Buffer, JobFrame

LONG = 256
"""Characters of a text, or elements of a list of token ids, from which on it is taken out."""
MOST_VALUES = 131_072
"""Most commas and brackets of what is left: some 20 ms of parsing and checking."""
KEY_BYTES = 6
"""Bytes of a key and its value in a text of JSON, at least: `"a":1,`. A prompt that is such a text is not refused."""
IDS = "I"
"""Type of an array of token ids: 32 bits without a sign."""
_MOST_ID = 2**32 - 1
_LISTS_OF_IDS = ("prompt", "tokens")
"""Fields with token ids, or with lists of them."""
_Place = tuple[str | int, ...]
_Taken = tuple[_Place, str, bytes]


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


def take_apart(body: Buffer, most_values: int) -> JobFrame:
    """The rest of a body's value as JSON, with what was taken out of it behind it. `not_json`: the fault and its place,
    where it is no JSON; `values`: a sentence, where there are too many; `surrogate`: true where a text is no
    Unicode."""
    if fault := too_many_values(body, most_values):
        return JobFrame({"values": fault})
    taken: list[_Taken] = []
    try:
        value = _without_long(json.loads(bytes(body)), (), taken)
        rest = json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return JobFrame({"not_json": [error.msg, error.pos]})
    except UnicodeEncodeError:
        return JobFrame({"surrogate": True})
    except ValueError:  # not in UTF-8, or a number of very many digits
        return JobFrame({"unreadable": True})
    if fault := too_many_values(rest, MOST_VALUES):
        return JobFrame({"values": fault})
    places = json.dumps([(place, kind, len(content)) for place, kind, content in taken]).encode()
    return JobFrame(
        {"sizes": [len(places), len(rest)]}, b"".join((places, rest, *(content for _, _, content in taken)))
    )


def put_together(result: JobFrame) -> Any:
    """The body's value. Long lists of token ids are arrays of them."""
    (first, second), view = result.head["sizes"], memoryview(result.body)
    places, value = json.loads(bytes(view[:first])), json.loads(bytes(view[first : first + second]))
    begin = first + second
    for place, kind, size in places:
        content, begin = view[begin : begin + size], begin + size
        made: Any = str(content, "utf-8") if kind == "text" else array(IDS, bytes(content))
        if not place:
            return made
        parent = value
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = made
    return value


def _without_long(value: Any, place: _Place, taken: list[_Taken]) -> Any:
    if isinstance(value, str) and len(value) >= LONG:
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


def _are_ids(values: list[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= _MOST_ID
