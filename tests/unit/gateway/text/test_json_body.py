"""A body that is taken apart and put together again is the value that it was, and what is wrong is named."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text import json_body
from gateway.text.json_body import FEW, LONG, MOST_OF_ONE, PIECE_VALUES, put_together, take_apart
from slipstream.errors import InvalidArgument

MOST = 1 << 20
LONG_TEXTS = st.text(min_size=1, max_size=4).map(lambda text: text * LONG)
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3).map(lambda ids: ids * LONG)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | LONG_TEXTS | IDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries({"prompt": VALUES, "tokens": IDS, "other": VALUES})


def back(body: bytes) -> Any:
    return asyncio.run(put_together(take_apart(body, MOST)))


def plain(value: Any) -> Any:
    """The value with lists in the place of arrays."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | array) else value


@given(value=VALUES | FIELDS)
def test_a_value_comes_back(value: Any) -> None:
    assert plain(back(json.dumps(value).encode())) == value


def test_long_lists_of_token_ids_are_packed_where_they_may_stand_and_nowhere_else() -> None:
    ids = list(range(LONG))
    value = {"prompt": [ids, ids], "tokens": ids, "metadata": ids, "more": [2**32, *ids], "other": [-1, *ids]}
    made = back(json.dumps(value).encode())
    assert [type(each) for each in (*made["prompt"], made["tokens"])] == [array] * 3
    assert [type(made[name]) for name in ("metadata", "more", "other")] == [list] * 3
    for wrong in ([True] * LONG, [1.0] * LONG, [-1] * LONG, [2**32] * LONG, [None] * LONG):
        assert back(json.dumps({"prompt": wrong}).encode()) == {"prompt": wrong}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"prompt": "x"', {"not_json": ["Expecting ',' delimiter", 14]}),
        (b'{"prompt": "\\ud800"}', {"surrogate": True}),
        (b'{"prompt": "' + b"\\ud800" * LONG + b'"}', {"surrogate": True}),
        (b'{"prompt": "\xff"}', {"unreadable": True}),
        (b'{"prompt": ' + b"9" * 5000 + b"}", {"unreadable": True}),
    ],
)
def test_the_fault_of_a_body_is_returned(body: bytes, fault: Any) -> None:
    assert take_apart(body, MOST).head == fault


def test_values_are_counted_before_anything_is_parsed_and_again_without_long_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "sizes" in take_apart(json.dumps({"prompt": "," * 1000, "tokens": [1] * 1000}).encode(), 2010, 100).head
    assert "101" not in take_apart(json.dumps({"prompt": [[1]] * 101}).encode(), 2000, 100).head["values"]
    monkeypatch.setattr(json_body, "json", None)
    assert "values" in take_apart(b"[" + b"1," * 2000 + b"1]", 2000).head


def test_a_body_nested_too_deeply_is_refused_by_the_process_that_reads_it() -> None:
    with pytest.raises((RecursionError, InvalidArgument)):
        take_apart(b"[" * 3000 + b"]" * 3000, MOST)


def test_long_lists_come_in_pieces_of_few_values_and_other_requests_have_their_turn_between_them() -> None:
    messages = [{"role": "user", "content": "x" * (LONG if number % 100 == 0 else 1)} for number in range(5000)]
    value = {"model": "m", "messages": messages, "n": 1, "tools": [{"name": "f"}] * (FEW + 1), "stop": ["a"]}
    result = take_apart(json.dumps(value).encode(), MOST)
    pieces = [(name, *sizes) for name, *sizes in result.head["sizes"]]
    assert [name for name, *_ in pieces] == [None, *["messages"] * (len(pieces) - 2), "tools"]
    assert len(pieces) > 5000 * 3 / (PIECE_VALUES + 3)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> Any:
        task = asyncio.create_task(others())
        made = await put_together(result)
        task.cancel()
        return made

    assert list(asyncio.run(main()).items()) == list(value.items())
    assert turns >= len(pieces) - 2


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"content": [1] * MOST_OF_ONE}] * 20},
        {"metadata": [[1] * 10] * 2, "kwargs": {"x": [1] * MOST_OF_ONE}},
        {"messages": [{"function": {"arguments": json.dumps({"x": [1] * MOST_OF_ONE})}}]},
    ],
    ids=["an element", "the rest", "arguments"],
)
def test_one_value_of_very_many_is_refused(value: Any) -> None:
    assert str(MOST_OF_ONE) in take_apart(json.dumps(value).encode(), MOST).head["values"]
