"""Arguments of calls: whatever text they are, a template and a strict client can read what is made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api.openai.call_arguments import INVALID, are_whole, as_object, with_objects

PIECES = st.sampled_from([*'{}[]":,', "\\", r"\ud800", r"\ude00", "NaN", "-Infinity", "1e999", "1", "null", "é", "a"])


def strictly(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@given(st.lists(PIECES).map("".join) | st.lists(PIECES).map(lambda pieces: '{"a":' + "".join(pieces) + "}"))
@example(r'{"a": "\ud800"}')
@example('{"a": 1e999}')
@example('{"a": 1' + "0" * 5000 + "}")
@example('{"a":' * 5000 + "1" + "}" * 5000)
def test_an_object_can_be_written_and_has_the_values_of_the_text(arguments: str) -> None:
    read = as_object(arguments)
    assert json.loads(strictly(read)) == read
    assert read == {INVALID: arguments} or read == json.loads(arguments)  # in this order: not all can be loaded


@pytest.mark.parametrize("arguments", ["{}", '{"a": 1.5}', r'{"a": "\ud83d\ude00"}', '{"a": null}'])
def test_an_object_is_read(arguments: str) -> None:
    assert as_object(arguments) == json.loads(arguments) and are_whole(arguments)


@pytest.mark.parametrize("arguments", ["", "{", '{"a": 1', '{"version": "f",', "x"])
def test_arguments_that_are_cut_are_wrapped(arguments: str) -> None:
    assert as_object(arguments) == {INVALID: arguments} and not are_whole(arguments)


def test_arguments_that_an_earlier_version_parsed_stay() -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": given}} for given in ('{"a": 1}', {"a": 1})]
    read = with_objects({"role": "assistant", "tool_calls": calls})["tool_calls"]
    assert [call["function"]["arguments"] for call in read] == [{"a": 1}, {"a": 1}]
    assert calls[0]["function"]["arguments"] == '{"a": 1}'
