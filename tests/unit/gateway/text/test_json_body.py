"""A body that is taken apart and put together again is the value that it was, and what is wrong is named."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text import json_body
from gateway.text.json_body import LONG, put_together, take_apart
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


def plain(value: Any) -> Any:
    """The value with lists in the place of arrays."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | array) else value


@given(value=VALUES | FIELDS)
def test_a_value_comes_back(value: Any) -> None:
    assert plain(put_together(take_apart(json.dumps(value).encode(), MOST))) == value


def test_long_lists_of_token_ids_are_packed_where_they_may_stand_and_nowhere_else() -> None:
    ids = list(range(LONG))
    value = {"prompt": [ids, ids], "tokens": ids, "metadata": ids, "more": [2**32, *ids], "other": [-1, *ids]}
    back = put_together(take_apart(json.dumps(value).encode(), MOST))
    assert [type(each) for each in (*back["prompt"], back["tokens"])] == [array] * 3
    assert [type(back[name]) for name in ("metadata", "more", "other")] == [list] * 3
    for wrong in ([True] * LONG, [1.0] * LONG, [-1] * LONG, [2**32] * LONG, [None] * LONG):
        assert put_together(take_apart(json.dumps({"prompt": wrong}).encode(), MOST)) == {"prompt": wrong}


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
def test_what_is_wrong_with_a_body_is_returned(body: bytes, fault: Any) -> None:
    assert take_apart(body, MOST).head == fault


def test_values_are_counted_before_anything_is_parsed_and_again_without_long_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_body, "MOST_VALUES", 100)
    assert "sizes" in take_apart(json.dumps({"prompt": "," * 1000, "tokens": [1] * 1000}).encode(), 2010).head
    assert "101" not in take_apart(json.dumps({"prompt": [[1]] * 101}).encode(), 2000).head["values"]
    monkeypatch.setattr(json_body, "json", None)
    assert "values" in take_apart(b"[" + b"1," * 2000 + b"1]", 2000).head


def test_a_body_nested_too_deeply_is_refused_by_the_process_that_reads_it() -> None:
    with pytest.raises((RecursionError, InvalidArgument)):
        take_apart(b"[" * 3000 + b"]" * 3000, MOST)
