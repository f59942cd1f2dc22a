"""Text, reasoning and calls are told apart, whatever a model writes instead of a call, in linear time."""

from __future__ import annotations

import json
import time
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.answers.formats import (
    CALLS,
    GLM,
    HARMONY,
    HERMES,
    JSON,
    KIMI,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    NONE,
    PYTHONIC,
    QWEN_CODER,
    SEED_THINK,
    THINK,
    THOUGHTS,
    UNKNOWN,
    AnswerFormat,
)
from gateway.text.answers.reader import Arguments, CallBegan, PlainReader, Reasoning, joined
from tests.support.model_answers import Call, Read, read

TOOLS: dict[str, dict[str, list[str]]] = {
    "weather": {"at": ["string"], "days": ["integer"], "more": [], "note": ["null", "string"]},
    "now": {},
}
FORMATS = {name: AnswerFormat(name, HARMONY if name == HARMONY else THINK, TOOLS) for name in (*CALLS, JSON)}
CALL = '{"name": "weather", "arguments": {"at": "Ärö", "days": [1, 2]}}'
WANTED = Call("weather", '{"at": "Ärö", "days": [1, 2]}')
LLAMA_CALL = '{"name": "weather", "parameters": {"at": "Ärö", "days": [1, 2]}}'
OTHER = '{"name": "unknown", "arguments": {}}'
ENCODED = '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'


def xml(*pairs: str) -> str:
    return "<tool_call>\n<function=weather>\n" + "\n".join(pairs) + "\n</function>\n</tool_call>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>"


EXAMPLES: list[tuple[str, str, list[Read]]] = [
    (
        HERMES,
        f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
        ["I look.\n", WANTED, WANTED],
    ),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n so <b>it</b> is ", [WANTED, "\n so <b>it</b> is "]),
    (HERMES, f"\n\n<tool_call>\n{CALL}", [WANTED]),
    (HERMES, "<tool_call>nonsense</tool_call>", ["<tool_call>nonsense</tool_call>"]),
    (HERMES, '<tool_call>{"name": 3}</tool_call>x', ['<tool_call>{"name": 3}</tool_call>x']),
    (HERMES, f"<tool_call>{OTHER}</tool_call>x", [f"<tool_call>{OTHER}</tool_call>x"]),
    (
        HERMES,
        f"<tool_call>{OTHER}</tool_call><tool_call>{CALL}</tool_call>",
        [f"<tool_call>{OTHER}</tool_call>", WANTED],
    ),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"at": "</tool_call> \\" {"}}</tool_call>x',
        [Call("weather", '{"at": "</tool_call> \\" {"}'), "x"],
    ),
    (HERMES, '<tool_call>{"id": [{"a": "}"}, 1e5], "name": "now", "arguments": {}}</tool_call>', [Call("now", "{}")]),
    (HERMES, ENCODED, [ENCODED]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', [Call("now", "{}")]),
    (HERMES, f"<tool_call>{CALL}}}</tool_call>x", [WANTED, "x"]),
    (HERMES, f"<tool_call>{CALL[:-1]}</tool_call>x", [WANTED, "x"]),
    (HERMES, f"<tool_call>{CALL}<tool_call>{CALL}", [WANTED, WANTED]),
    (HERMES, f"<tool_call>{CALL} and on", [WANTED, "and on"]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"at": "Ä', [Call("weather", '{"at": "Ä')]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": [1}}</tool_call>x', [Call("weather", '{"a": [1'), "x"]),
    (HERMES, "<tool_call>" + "[" * 5000, ["<tool_call>" + "[" * 5000]),
    (HERMES, "a < b <tool", ["a < b <tool"]),
    (HERMES, "", []),
    (HERMES, " \n", [" \n"]),
    (LLAMA, LLAMA_CALL, [WANTED]),
    (LLAMA, f" {LLAMA_CALL}; {LLAMA_CALL}", [WANTED, WANTED]),
    (LLAMA, f"So: <|python_tag|>{LLAMA_CALL}", ["So: ", WANTED]),
    (LLAMA, '<|python_tag|>brave_search.call(query="x")', ['<|python_tag|>brave_search.call(query="x")']),
    (LLAMA, "{not a call}", ["{not a call}"]),
    (LLAMA, '{"name": "Alice", "age": 30}', ['{"name": "Alice", "age": 30}']),
    (LLAMA, '{"name": "now", "age": 30}', ['{"name": "now", "age": 30}']),
    (LLAMA, OTHER, [OTHER]),
    (LLAMA, f"{LLAMA_CALL} and text", [WANTED, " and text"]),
    (LLAMA, f"Text {LLAMA_CALL}", [f"Text {LLAMA_CALL}"]),
    (MISTRAL, f"[{CALL}, {CALL}]", [WANTED, WANTED]),
    (MISTRAL, f"So: [TOOL_CALLS] [{CALL}]", ["So: ", WANTED]),
    (MISTRAL, '[{"name": "Alice", "age": 30}]', ['[{"name": "Alice", "age": 30}]']),
    (MISTRAL, "[1] is the source", ["[1] is the source"]),
    (MISTRAL, "[TOOL", ["[TOOL"]),
    (MISTRAL_ARGS, '[TOOL_CALLS]unknown[ARGS]{"a": 1}', ['[TOOL_CALLS]unknown[ARGS]{"a": 1}']),
    (QWEN_CODER, xml(), [Call("weather", "{}")]),
    (QWEN_CODER, "<function=now>\n</function>", [Call("now", "{}")]),
    (
        QWEN_CODER,
        xml(parameter("at", '</b> "x"\n\n  y\n'), parameter("days", "3")),
        [Call("weather", '{"at": "</b> \\"x\\"\\n\\n  y\\n", "days": 3}')],
    ),
    (
        QWEN_CODER,
        xml(parameter("days", "three"), parameter("at", "3")),
        [Call("weather", '{"days": "three", "at": "3"}')],
    ),
    (QWEN_CODER, xml(parameter("more", "{'a': True}")), [Call("weather", '{"more": {"a": true}}')]),
    (QWEN_CODER, xml(parameter("more", "False")), [Call("weather", '{"more": false}')]),
    (QWEN_CODER, xml(parameter("note", "null")), [Call("weather", '{"note": null}')]),
    (QWEN_CODER, xml(parameter("note", "12")), [Call("weather", '{"note": "12"}')]),
    (QWEN_CODER, "<tool_call>\n<function=weather>\n<parameter=at>\nÄ", [Call("weather", '{"at": "Ä')]),
    (QWEN_CODER, "<tool_call>\n<function=other>\n</function>", ["<tool_call>\n<function=other>\n</function>"]),
    (QWEN_CODER, f"<tool_call>{CALL}</tool_call>", [f"<tool_call>{CALL}</tool_call>"]),
    (GLM, "So.\n<tool_call>now\n</tool_call>", ["So.\n", Call("now", "{}")]),
    (GLM, "<tool_call>now</tool_call>\n<tool_call>now</tool_call>", [Call("now", "{}"), Call("now", "{}")]),
    (GLM, "<tool_call>other\n</tool_call>", ["<tool_call>other\n</tool_call>"]),
    (
        GLM,
        "<tool_call>weather<arg_key>at</arg_key><arg_value>Bern</arg_value></tool_call>",
        [Call("weather", '{"at": "Bern"}')],
    ),
    (PYTHONIC, "[now()]", [Call("now", "{}")]),
    (PYTHONIC, "[weather(at='a\\'\\n\\u00e9', days=-1.5)]", [Call("weather", '{"at": "a\'\\n\\u00e9", "days": -1.5}')]),
    (PYTHONIC, "[other()]", ["[other()]"]),
    (PYTHONIC, "[1] is the source", ["[1] is the source"]),
    (PYTHONIC, "[weather(at=now())]", [Call("weather", '{"at": '), "())]"]),
    (PYTHONIC, "[now(), 3] x", [Call("now", "{}"), ", 3] x"]),
    (KIMI, "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>", [Call("now", "{}", "now")]),
    (
        KIMI,
        "<|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{}<|tool_call_end|>x",
        ["<|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{}x"],
    ),
    (HARMONY, "Plain text", ["Plain text"]),
    (HARMONY, "<|channel|>final<|message|>Yes <|x|>", ["Yes <|x|>"]),
    (
        HARMONY,
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [Call("now", "{}")],
    ),
    (
        HARMONY,
        "<|channel|>commentary to=functions.other json<|message|>{}",
        ["<|channel|>commentary to=functions.other json<|message|>{}"],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>A\n<|end|><|start|>assistant<|channel|>analysis<|message|>B",
        [Reasoning("A\nB")],
    ),
    (UNKNOWN, f"<tool_call>{CALL}</tool_call>", [f"<tool_call>{CALL}</tool_call>"]),
]


def format_of(name: str) -> AnswerFormat:
    return FORMATS.get(name) or AnswerFormat(name, NONE, TOOLS)


@pytest.mark.parametrize(("name", "text", "wanted"), EXAMPLES)
def test_text_and_calls_are_separated_for_every_single_cut(name: str, text: str, wanted: list[Read]) -> None:
    format = format_of(name)
    assert read(format, [text]) == wanted
    assert read(format, list(text)) == wanted
    for at in range(0, len(text), max(1, len(text) // 100)):
        assert read(format, [text[:at], text[at:]]) == wanted


REASONED: list[tuple[str, bool, list[Read]]] = [
    ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", False, [Reasoning("Hm.\n\nSo."), "Yes."]),
    ("\nHm.</think>Yes.", True, [Reasoning("Hm."), "Yes."]),
    ("<think>Hm.</think>Yes.", True, [Reasoning("Hm."), "Yes."]),
    ("\n\n</think>\n\nYes. </think>", True, ["Yes. </think>"]),
    ("Yes, <think>no</think>.", False, ["Yes, <think>no</think>."]),
    ("<think>Hm. </thi", False, [Reasoning("Hm. </thi")]),
    (" <thin", False, [" <thin"]),
    ("", True, []),
    (f"<think>Hm.</think>\n<tool_call>{CALL}</tool_call>", False, [Reasoning("Hm."), WANTED]),
]


@pytest.mark.parametrize(("text", "opened", "wanted"), REASONED)
def test_reasoning_comes_apart(text: str, opened: bool, wanted: list[Read]) -> None:
    for at in range(len(text) + 1):
        assert read(FORMATS[HERMES], [text[:at], text[at:]], opened=opened) == wanted
    assert read(FORMATS[HERMES], list(text), opened=opened) == wanted


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (THINK, " so.\n\nHm.\n</think>\n\nYes.", [Reasoning(" so.\n\nHm."), "Yes."]),
        (THINK, "\nHm.</think>", [Reasoning("\nHm.")]),
        (THINK, "</think>Yes.", ["Yes."]),
        (HARMONY, " so.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", [Reasoning(" so."), "Yes."]),
        (HARMONY, " so. </", [Reasoning(" so. </")]),
    ],
)
def test_reasoning_that_began_in_the_prompt_is_continued(name: str, text: str, wanted: list[Read]) -> None:
    format = AnswerFormat(HARMONY if name == HARMONY else NONE, name, TOOLS)
    for pieces in ([text], list(text)):
        reader = format.reader(opened=True, within=True)
        parts = [part for piece in pieces for part in reader.push(piece)]
        assert list(joined([*parts, *reader.finish()])) == wanted


@pytest.mark.parametrize("name", THOUGHTS)
def test_each_family_has_reasoning_marks_of_its_own(name: str) -> None:
    thoughts = THOUGHTS[name]
    text = f"{thoughts.begin}Hm.{thoughts.end}Yes."
    assert read(AnswerFormat(NONE, name), list(text)) == [Reasoning("Hm."), "Yes."]
    assert read(AnswerFormat(NONE, SEED_THINK if name != SEED_THINK else THINK), [text]) == [text]


def test_an_answer_without_tools_and_reasoning_is_text() -> None:
    reader = AnswerFormat().reader()
    assert isinstance(reader, PlainReader)
    assert [*reader.push(f"<tool_call>{CALL}"), *reader.push(""), *reader.finish()] == [f"<tool_call>{CALL}"]


@pytest.mark.parametrize("name", [HERMES, MISTRAL])
def test_a_single_call_is_the_first_of_several(name: str) -> None:
    text = (
        f"So: <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> and"
        if name == HERMES
        else f"[{CALL}, {CALL}]"
    )
    format = AnswerFormat(name, NONE, TOOLS, single=True)
    wanted = ["So: ", WANTED, " and"] if name == HERMES else [WANTED]
    assert read(format, [text]) == read(format, list(text)) == wanted


WORDS = [
    *(CALL, LLAMA_CALL, OTHER, "<tool_call>", "</tool_call>", "<think>", "</think>", "[", "]", "{", "}", '"', ";", ","),
    *(" ", "\n", "x", "<", "\\", "now", "weather(", "at=", "'", ")", "<function=", "<parameter=", ">", "</parameter>"),
    *("</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>"),
    *("analysis", "final", "to=functions.now", "<|message|>", "<|end|>", "<|start|>", "<|tool_call_begin|>"),
    *(
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "function",
        "```json",
    ),
]


@given(st.sampled_from(list(FORMATS)), st.lists(st.sampled_from(WORDS), max_size=20), st.booleans(), st.data())
@settings(max_examples=300)
def test_any_cut_of_any_text_gives_the_same(name: str, words: list[str], opened: bool, data: st.DataObject) -> None:
    text, format = "".join(words), FORMATS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format, pieces, opened=opened) == read(format, [text], opened=opened)


@given(st.sampled_from(list(FORMATS)), st.lists(st.sampled_from(WORDS), max_size=20), st.data())
@settings(max_examples=200)
def test_runs_return_what_their_characters_would(name: str, words: list[str], data: st.DataObject) -> None:
    text, format = "".join(words), FORMATS[name]
    known = data.draw(st.integers(0, len(text)))
    reader, single = format.reader(), format.reader()
    last: Any = None
    for one in text[:known]:
        parts = single.push(one)
        assert reader.push(one) == parts
        last = parts[-1] if parts else last
    run = reader.run(text, known)
    returned = [single.push(one) for one in text[known : known + run]]
    if any(returned):
        kind = type(last)
        assert returned == [[one if kind is str else kind(one)] for one in text[known : known + run]]


@given(st.sampled_from(list(FORMATS)), st.lists(st.sampled_from(WORDS), max_size=16), st.data())
def test_parts_returned_for_a_prefix_depend_on_that_prefix_alone(
    name: str, words: list[str], data: st.DataObject
) -> None:
    """A client that resumes has what its part of the text says."""
    text = "".join(words)
    at = data.draw(st.integers(0, len(text)))
    one_by_one, at_once = FORMATS[name].reader(), FORMATS[name].reader()
    parts = [part for character in text[:at] for part in one_by_one.push(character)]
    assert _joined(parts) == _joined(at_once.push(text[:at]))


def _joined(parts: list[Any]) -> list[Any]:
    made: list[Any] = []
    for part in parts:
        if made and type(part) is type(made[-1]) and isinstance(part, str):
            made[-1] += part
        elif made and type(part) is type(made[-1]) and isinstance(part, (Reasoning, Arguments)):
            made[-1] = type(part)(made[-1].text + part.text)
        else:
            made.append(part)
    return made


@given(
    st.dictionaries(st.text(max_size=3), st.recursive(st.text(max_size=4) | st.integers() | st.booleans(), st.lists))
)
def test_arguments_of_any_kind_survive(arguments: dict[str, Any]) -> None:
    written = json.dumps(arguments)
    (call,) = read(FORMATS[HERMES], [f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'])
    assert call == Call("now", written)
    literal = ", ".join(f"a{index}={value!r}" for index, value in enumerate(arguments.values()))
    (call,) = read(FORMATS[PYTHONIC], list(f"[now({literal})]"))
    assert isinstance(call, Call)
    assert list(json.loads(call.arguments).values()) == list(arguments.values())


class Scanned(str):
    """A text that counts the characters which are copied, in itself and in what is made of it."""

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


LONG = 200_000
BEGUN = '<tool_call>{"name": "weather", "arguments": {"a": '
MESSAGE = "<|channel|>commentary to=functions.now json<|message|>"
ENDLESS = {
    "an unclosed call": (HERMES, "<tool_call>" + "x" * LONG),
    "unclosed arguments": (HERMES, BEGUN + '"' + "x" * LONG),
    "open brackets": (HERMES, BEGUN + "[" * LONG),
    "many brackets": (HERMES, BEGUN + "[]," * (LONG // 3)),
    "backslashes": (HERMES, BEGUN + '"' + "\\\\" * (LONG // 2)),
    "arguments before a name": (HERMES, '<tool_call>{"arguments": {"a": "' + "x" * LONG),
    "another key": (HERMES, '<tool_call>{"a": ' + "[" * LONG),
    "marks that end no call": (HERMES, "<tool_call>" + "</tool_call" * (LONG // 11)),
    "no end mark": (HERMES, f"<tool_call>{CALL}" + "</tool_call" * (LONG // 11)),
    "space behind a call": (HERMES, f"<tool_call>{CALL}</tool_call>" + " " * LONG),
    "marks that begin no call": (HERMES, "<tool_call" * (LONG // 10)),
    "many calls": (HERMES, "<tool_call></tool_call>" * (LONG // 23)),
    "reasoning": (HERMES, "<think>" + "x\n" * (LONG // 2)),
    "lines in reasoning": (HERMES, "<think>x" + "\n" * LONG),
    "an open object": (LLAMA, "{" + "x" * LONG),
    "space": (LLAMA, " " * LONG),
    "semicolons": (LLAMA, LLAMA_CALL + "; " * (LONG // 2)),
    "an open list": (MISTRAL, "[" + "x" * LONG),
    "a long name": (MISTRAL_ARGS, "[TOOL_CALLS]" + "x" * LONG),
    "a long parameter": (QWEN_CODER, "<function=weather><parameter=at>" + "\n" * LONG),
    "a long parameter of no type": (QWEN_CODER, "<function=weather><parameter=more>" + "[" * LONG),
    "a long function": (QWEN_CODER, "<function=" + "x" * LONG),
    "long keys": (GLM, "<tool_call>weather<arg_key>" + "x" * LONG),
    "a long string": (PYTHONIC, "[weather(at='" + "\\n" * (LONG // 2)),
    "deep lists": (PYTHONIC, "[weather(at=" + "[" * LONG),
    "a long header": (KIMI, "<|tool_call_begin|>" + ":1" * (LONG // 2)),
    "a long message": (HARMONY, MESSAGE + "{" * LONG),
    "many messages": (HARMONY, "<|channel|>analysis<|message|>x<|end|>" * (LONG // 40)),
    "many channels": (HARMONY, "<|channel|>" * (LONG // 11)),
}


@pytest.mark.parametrize("size", [1, 7, LONG], ids=["characters", "pieces", "whole"])
@pytest.mark.parametrize("name", ENDLESS)
def test_each_character_is_read_a_bounded_number_of_times(name: str, size: int) -> None:
    format, text = ENDLESS[name]
    text = text[: LONG // 50]
    pieces = [Scanned(text[at : at + size]) for at in range(0, len(text), size)]
    reader = FORMATS[format].reader()
    Scanned.work = 0
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    assert Scanned.work < 100 * len(text)


@pytest.mark.parametrize("name", ENDLESS)
def test_the_time_to_parse_an_answer_is_linear_in_its_length(name: str) -> None:
    """What is quadratic takes sixteen times as long for four times the text."""
    format, text = ENDLESS[name]
    quarter = _seconds(format, text[: LONG // 4])
    # Again only where something else held up the first try.
    assert any(_seconds(format, text) < 12 * quarter + 0.05 for _ in range(2))


def _seconds(format: str, text: str) -> float:
    reader, began = FORMATS[format].reader(), time.process_time()
    for at in range(0, len(text), 16):
        reader.push(text[at : at + 16])
    reader.finish()
    return time.process_time() - began


def test_a_call_begins_with_its_name_and_before_its_arguments_are_known() -> None:
    reader = FORMATS[HERMES].reader()
    assert reader.push('<tool_call>{"name": "weather"') == []
    assert reader.push(', "arguments": {"at') == [CallBegan("weather"), Arguments("{"), Arguments('"'), Arguments("at")]
