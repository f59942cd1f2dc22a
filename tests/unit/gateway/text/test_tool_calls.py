"""Calls of tools are found in a model's text, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.tool_calls import HERMES, LLAMA, MISTRAL, Part, PlainReader, ToolCall, format_of, new_reader
from slipstream.errors import FailedPrecondition

CALL = '{"name": "weather", "arguments": {"at": "Ärö", "days": [1, 2]}}'
WANTED = ToolCall("weather", '{"at": "Ärö", "days": [1, 2]}')
LLAMA_CALL = '{"name": "weather", "parameters": {"at": "Ärö", "days": [1, 2]}}'
EXAMPLES: list[tuple[str, str, list[Part]]] = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", [WANTED]),
    (
        HERMES,
        f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
        ["I look.\n", WANTED, WANTED],
    ),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n so <b>it</b> is ", [WANTED, "\n so <b>it</b> is "]),
    (HERMES, f"<tool_call>\n{CALL}", [WANTED]),
    (HERMES, "<tool_call>nonsense</tool_call>", ["<tool_call>nonsense</tool_call>"]),
    (HERMES, '<tool_call>{"name": 3}</tool_call>x', ['<tool_call>{"name": 3}</tool_call>x']),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'],
    ),
    (HERMES, "<tool_call>" + "[" * 5000, ["<tool_call>" + "[" * 5000]),
    (HERMES, "a < b <tool", ["a < b <tool"]),
    (HERMES, "", []),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", "{}")]),
    (LLAMA, LLAMA_CALL, [WANTED]),
    (LLAMA, f" {LLAMA_CALL}; {LLAMA_CALL}", [WANTED, WANTED]),
    (LLAMA, "{not a call}", ["{not a call}"]),
    (LLAMA, '{"name": "Alice", "age": 30}', ['{"name": "Alice", "age": 30}']),
    (LLAMA, '{"name": "now", "parameters": {}}', [ToolCall("now", "{}")]),
    (MISTRAL, '[{"name": "Alice", "age": 30}]', ['[{"name": "Alice", "age": 30}]']),
    (LLAMA, f"{LLAMA_CALL} and text", [f"{LLAMA_CALL} and text"]),
    (LLAMA, f"Text {LLAMA_CALL}", [f"Text {LLAMA_CALL}"]),
    (MISTRAL, f"[{CALL}, {CALL}]", [WANTED, WANTED]),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}]", [WANTED]),
    (MISTRAL, f"[{CALL}, 3]", [f"[{CALL}, 3]"]),
    (MISTRAL, "[1] is the source", ["[1] is the source"]),
]


def read(format: str, pieces: list[str]) -> list[Part]:
    """What comes out, with neighbouring texts joined."""
    reader = new_reader(format)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("format", "text", "wanted"), EXAMPLES)
def test_text_and_calls_are_told_apart_for_every_single_cut(format: str, text: str, wanted: list[Part]) -> None:
    assert read(format, [text]) == wanted
    assert read(format, list(text)) == wanted
    for at in range(0, len(text), max(1, len(text) // 200)):
        assert read(format, [text[:at], text[at:]]) == wanted


@given(
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.lists(
        st.sampled_from([CALL, LLAMA_CALL, "<tool_call>", "</tool_call>", "[", "]", "{", ";", " ", "\n", "x", "<"])
    ),
    st.data(),
)
def test_any_cut_of_any_text_gives_the_same(format: str, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format, pieces) == read(format, [text])


@given(st.text(alphabet="<tool_call>{}[] \nabc", max_size=60), st.data())
def test_what_was_returned_for_a_beginning_depends_on_the_beginning_alone(text: str, data: st.DataObject) -> None:
    """A client that resumes has what its part of the text says."""
    at = data.draw(st.integers(0, len(text)))
    whole, cut = new_reader(HERMES), new_reader(HERMES)
    one_by_one = [part for character in text[:at] for part in whole.push(character)]
    at_once = cut.push(text[:at])
    assert "".join(map(str, one_by_one)) == "".join(map(str, at_once))


def test_an_answer_without_tools_is_text() -> None:
    reader = PlainReader()
    assert [*reader.push(f"<tool_call>{CALL}</tool_call>"), *reader.push(""), *reader.finish()] == [
        f"<tool_call>{CALL}</tool_call>"
    ]


def test_arguments_are_always_json_of_an_object() -> None:
    for _, _, parts in EXAMPLES:
        assert all(isinstance(json.loads(part.arguments), dict) for part in parts if isinstance(part, ToolCall))


def test_the_format_is_read_off_the_template() -> None:
    assert format_of("{% if tools %}<tool_call>", "auto") == HERMES
    assert format_of("{{ tools }}[TOOL_CALLS]", "auto") == MISTRAL
    assert format_of("{{ tools }}<|python_tag|>", "auto") == LLAMA
    assert format_of("{{ tools }}", "mistral") == MISTRAL
    for template in ("{{ tools }}", "{{ tools }}<tool_call><function=", "{{ tools }}[TOOL_CALLS][ARGS]"):
        with pytest.raises(FailedPrecondition, match="GATEWAY_TOOL_CALLS"):
            format_of(template, "auto")
    with pytest.raises(FailedPrecondition, match="takes no tools"):
        format_of("<tool_call>", "hermes")


class Scanned(str):
    """A text that counts the characters which are copied or compared, in itself and in what is made of it."""

    work = 0

    def __add__(self, other: str) -> Scanned:
        Scanned.work += len(self) + len(other)
        return Scanned(str(self) + str(other))

    def __radd__(self, other: str) -> Scanned:
        Scanned.work += len(self) + len(other)
        return Scanned(str(other) + str(self))

    def __getitem__(self, at: SupportsIndex | slice) -> Scanned:
        part = Scanned(super().__getitem__(at))
        Scanned.work += len(part)
        return part

    def find(self, mark: str, start: Any = 0, end: Any = None) -> int:
        found = super().find(mark, start, end)
        Scanned.work += (found if found >= 0 else len(self)) - start + len(mark)
        return found

    def strip(self, characters: str | None = None) -> Scanned:
        Scanned.work += len(self)
        return Scanned(super().strip(characters))

    def lstrip(self, characters: str | None = None) -> Scanned:
        Scanned.work += len(self)
        return Scanned(super().lstrip(characters))


LONG = 4000
ENDLESS = {
    "an unclosed call": (HERMES, "<tool_call>" + "x" * LONG),
    "marks that end no call": (HERMES, "<tool_call>" + "</tool_call" * (LONG // 11)),
    "space behind a call": (HERMES, f"<tool_call>{CALL}</tool_call>" + " " * LONG),
    "marks that begin no call": (HERMES, "<tool_call" * (LONG // 10)),
    "many calls": (HERMES, "<tool_call></tool_call>" * (LONG // 23)),
    "an open object": (LLAMA, "{" + "x" * LONG),
    "space": (LLAMA, " " * LONG),
    "an open list": (MISTRAL, "[" + "x" * LONG),
}


@pytest.mark.parametrize("size", [1, 7, LONG], ids=["characters", "pieces", "whole"])
@pytest.mark.parametrize("name", ENDLESS)
def test_each_character_is_read_a_bounded_number_of_times(name: str, size: int) -> None:
    format, text = ENDLESS[name]
    pieces = [Scanned(text[at : at + size]) for at in range(0, len(text), size)]
    reader = new_reader(format)
    Scanned.work = 0
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    assert Scanned.work < 100 * len(text)


@given(st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "[", "{", " ", "x", "<"])), st.data())
def test_runs_return_what_their_characters_would(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    for format in (HERMES, LLAMA, MISTRAL):
        known = data.draw(st.integers(0, len(text)))
        reader, single = new_reader(format), new_reader(format)
        for one in text[:known]:
            assert reader.push(one) == single.push(one)
        silent, certain = reader.silent(text, known), reader.certain(text, known)
        returned = [single.push(one) for one in text[known:]]
        assert not any(returned[:silent])
        assert returned[:certain] == [[one] for one in text[known : known + certain]]
        assert not (silent and certain)
