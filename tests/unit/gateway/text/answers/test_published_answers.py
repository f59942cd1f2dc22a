"""Answers that makers of models published are read as they say, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.answers.formats import CALLS, HARMONY, XML
from gateway.text.answers.reader import Arguments, Part
from tests.support.model_answers import PUBLISHED, Call, Published, read

ALL = pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each.source)


@ALL
def test_an_answer_is_parsed_as_published_for_every_single_cut(published: Published) -> None:
    format, text, opened = published.format, published.text, published.opened
    assert read(format, [text], opened=opened) == published.wanted
    assert read(format, list(text), opened=opened) == published.wanted
    for at in range(len(text)):
        assert read(format, [text[:at], text[at:]], opened=opened) == published.wanted
    for call in published.wanted:
        assert not isinstance(call, Call) or isinstance(json.loads(call.arguments), dict)


def test_each_format_has_an_example() -> None:
    assert {each.calls for each in PUBLISHED} >= set(CALLS) and HARMONY in CALLS


@ALL
@given(st.data())
@settings(max_examples=10)
def test_fragments_and_repeated_parts_of_an_answer_are_parsed_alike_for_every_cut(
    published: Published, data: st.DataObject
) -> None:
    text = published.text
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=6)))
    text = "".join(text[start:end] for start, end in zip(ends, ends[1:] + ends[:1], strict=True)) + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(published.format, pieces) == read(published.format, [text]) == read(published.format, list(text))


@ALL
def test_arguments_come_as_they_are_written(published: Published) -> None:
    reader, parts = published.format.reader(opened=published.opened), list[Part]()
    for character in published.text:
        parts += reader.push(character)
    written = "".join(call.arguments for call in published.wanted if isinstance(call, Call))
    name_comes_last = published.text.find("arguments") < published.text.find('"name"')
    pieces = sum(isinstance(part, Arguments) for part in parts)
    kinds = [types for parameters in published.tools.values() for types in parameters.values()]
    at_once = published.calls in XML and ["string"] not in kinds  # what such a value is shows at its end
    assert pieces >= (3 if at_once else len(written) // 3) or (name_comes_last and pieces == 1)
