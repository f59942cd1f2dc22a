"""Every target on its corpus, and on changes of it that are the same in each run."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import TARGETS, corpus

CHANGES = 4000
"""Of the inputs of each target."""
WORDS = [b'"', b"{", b"}", b"[", b"]", b"\\u0000", b"\\ud800", b"<tool_call>", b"</tool_call>", b"[TOOL_CALLS]"]
WORDS += [
    b"<|im_start|>",
    b"<|im_end|>",
    b"1e999",
    b"NaN",
    b"null",
    b"-1",
    b"\xff\xff\xff\xff\x0f",
    b"\x00",
    b"\xff\xfe",
]


def changed(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
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


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_get_typed_answers_and_keep_their_promises(name: str) -> None:
    inputs, draw = list(corpus(name)), random.Random(name)
    assert len(inputs) >= 5
    for data in inputs:
        TARGETS[name](data)
    for _ in range(CHANGES):
        data = changed(draw.choice(inputs), inputs, draw)
        try:
            TARGETS[name](data)
        except Exception as error:
            raise AssertionError(f"{name} fails on {data!r}") from error
