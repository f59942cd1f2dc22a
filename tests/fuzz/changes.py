"""Changes of inputs: of their bytes, and of the value where they end with JSON."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

WORDS = [b'"', b"{", b"}", b"[", b"]", b"\\u0000", b"\\ud800", b"<tool_call>", b"</tool_call>", b"[TOOL_CALLS]"]
WORDS += [b"<|im_start|>", b"<|im_end|>", b"1e999", b"NaN", b"null", b"-1", b"\xff\xff\xff\xff\x0f", b"\x00"]
WORDS += [b"\xff\xfe"]
"""What inputs are made of."""
VALUES: list[Any] = [
    None,
    True,
    "",
    "<|im_end|>",
    "\x00",
    "\ud800",
    0,
    -1,
    2**64,
    1e-320,
    1e300,
    [],
    {},
    [[[]]],
    {"a": {}},
]
VALUES += [{"type": "text", "text": "x"}, {"type": "function"}, "user", "tool", "x" * 300, [1] * 300]


def changed_bytes(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """With a few bytes removed, repeated, replaced, or taken from elsewhere."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        begin = draw.randrange(len(made) + 1)
        end = min(len(made), begin + draw.choice([0, 1, 1, 2, 8, 64]))
        other = draw.choice(others)
        start = draw.randrange(len(other) + 1)
        piece = (
            draw.choice(WORDS),
            bytes([draw.randrange(256)]),
            made[begin:end] * 2,
            other[start : start + 32],
            b"",
        )
        made[begin:end] = draw.choice(piece)
    return bytes(made)


def changed_json(data: bytes, draw: random.Random) -> bytes | None:
    """With a value somewhere in it replaced, removed or repeated; None for what ends with no JSON."""
    begin = data.find(b"{")
    if begin not in (0, 1):
        return None
    try:
        value = json.loads(data[begin:])
        for _ in range(draw.randint(1, 3)):
            _change(value, draw)
        return data[:begin] + json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
    except (ValueError, RecursionError):
        return None


def _change(value: Any, draw: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys = each if isinstance(each, dict) else range(len(each))
        places += [(each, key) for key in keys]
        waiting += [each[key] for key in keys if isinstance(each[key], dict | list)]
    if not places:
        return
    parent, key = draw.choice(places)
    match draw.randrange(4):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, list):
            parent += parent[: draw.choice([1, 2, 300])]
        case 2:
            other, name = draw.choice(places)
            parent[key] = deepcopy(other[name])
        case _:
            parent[key] = deepcopy(draw.choice(VALUES))
