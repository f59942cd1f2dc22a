"""What an output is held to: whatever the masks let through is a call of a tool that was asked for as its family writes
it, or the request's own structure, beside which the model may call, and before which it may reason."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.text.answers.formats import (
    CALLS,
    GLM,
    HARMONY,
    HERMES,
    JSON,
    NONE,
    PYTHONIC,
    QWEN_CODER,
    THINK,
    AnswerFormat,
    answer_format,
)
from gateway.text.answers.grammar import ANY, CLOSED, OPEN, PLAIN, structure_of
from gateway.text.detokenizer import TokenDecoder
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.grammar import Cursor, Grammars, allows
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.tokenizer.vocabulary import fingerprint
from tests.support.grammars import END, allowed, place, spelled, tokenizer
from tests.support.model_answers import Call, read

CITY = {"enum": ["Bern", "Ulm"]}
WEATHER = {"type": "object", "properties": {"at": CITY}, "required": ["at"], "additionalProperties": False}
SHARED = {**WEATHER, "properties": {"at": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}}
HELD = [*CALLS, JSON]
"""Formats in which a call is forced."""
TOOLS = {"weather": {}, "wind": {}}
ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OWN = StructuredOutput("json_schema", json.dumps(ANSWER))


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BOTH = [tool("weather", WEATHER), tool("wind", SHARED)]


def no_token(mark: str) -> int | None:
    return None


def forced(format: AnswerFormat, tools: list[dict[str, Any]], name: str | None) -> StructuredOutput | None:
    return structure_of(format, tools, name, None, lambda: PLAIN, no_token)


@pytest.mark.parametrize("parameters", [WEATHER, SHARED], ids=["plain", "references"])
@pytest.mark.parametrize("format", [name for name in HELD if name != HARMONY])  # which may reason without end
def test_every_text_of_the_language_is_one_call_of_a_tool_that_was_asked_for(
    format: str, parameters: dict[str, Any]
) -> None:
    tools = [tool("weather", parameters), tool("wind", parameters)]
    answer, named = AnswerFormat(format, NONE, TOOLS), set[str]()
    for seed in range(6):
        for name in (ANY, "wind"):
            structure = forced(answer, tools, name)
            assert structure is not None
            cursor, rng, tokens = place(structure), random.Random(seed), list[int]()
            while END not in tokens:
                tokens.append(rng.choice(allowed(cursor.mask(tokens))))
            (call,) = read(answer, [spelled(tokens[:-1])])
            assert isinstance(call, Call) and json.loads(call.arguments)["at"] in CITY["enum"]
            assert json.dumps(json.loads(call.arguments)) == call.arguments
            assert call.name == "wind" or not name
            named.add(call.name)
    assert named == {"weather", "wind"}


RICH = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any."},
        "days": {"type": "integer", "minimum": 1},
        "city": {"$ref": "#/$defs/City"},
        "deep": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/City"}, "maxItems": 2},
    },
    "required": ["text", "days"],
    "$defs": {"City": {"type": "string", "enum": ["Bern", "7"]}},
}
FULL = {"text": 'a <b> "c"\nd', "days": 3, "city": "7", "deep": True, "note": "no", "tags": ["Bern"]}
APART = (QWEN_CODER, GLM, PYTHONIC)


def apart(format: str, arguments: dict[str, Any]) -> str:
    """A call of `look` as the family writes it."""
    if format == PYTHONIC:
        said = {key: json.dumps(each) if isinstance(each, list) else repr(each) for key, each in arguments.items()}
        return f"[look({', '.join(f'{key}={each}' for key, each in said.items())})]"
    said = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
    if format == QWEN_CODER:
        written = "".join(f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in said.items())
        return f"<tool_call>\n<function=look>\n{written}</function>\n</tool_call>"
    written = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>\n" for key, each in said.items())
    return f"<tool_call>look\n{written}</tool_call>"


@pytest.mark.parametrize("special", [True, False, None], ids=["special", "added", "text"])
@pytest.mark.parametrize("format", APART)
def test_arguments_apart_are_held_to_their_schemas(format: str, special: bool | None) -> None:
    tools = [tool("look", RICH)]
    answer = answer_format("{{ tools }}", tools, (format, NONE), forced=True)
    assert answer.calls == format
    model = Marked(answer, special)

    def takes(arguments: dict[str, Any], **others: Any) -> bool:
        return model.takes(model.structure(answer, "look", None, PLAIN, tools), apart(format, arguments | others))

    least = {key: FULL[key] for key in RICH["required"]}
    for given in (FULL, least, least | {"deep": False}, least | {"tags": []}, least | {"city": "Bern", "tags": ["7"]}):
        assert takes(given)
        (call,) = read(answer, [apart(format, given)])
        assert isinstance(call, Call) and json.loads(call.arguments) == given
    assert not takes({"text": "a"}) and not takes({"days": 3}) and not takes(least, days=0)
    assert not takes(least, city="Ulm") and not takes(least, tags=["Ulm"]) and not takes(least, other=1)
    if format == PYTHONIC:
        assert takes(least, note=None) and not takes(least, deep="x")


@pytest.mark.parametrize("format", APART)
@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [WEATHER, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
        {"type": "object", "properties": {"a b": {"type": "integer"}}},
        {"type": "object", "properties": {}, "minProperties": 1},
    ],
)
def test_arguments_whose_schema_the_native_format_cannot_enforce_are_written_as_json(
    format: str, parameters: dict[str, Any]
) -> None:
    assert answer_format("{{ tools }}", [tool("look", parameters)], (format, NONE), forced=True).calls == JSON
    plain = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    xml = answer_format("{{ tools }}", [tool("look", plain)], (format, NONE), forced=True).calls
    assert xml == (PYTHONIC if format == PYTHONIC else JSON)
    assert answer_format("{{ tools }}", [tool("look", None)], (format, NONE), forced=True).calls == format


def test_a_choice_of_the_model_holds_it_to_nothing_and_an_impossible_one_is_refused() -> None:
    format, weather = AnswerFormat(HERMES, NONE, TOOLS), tool("weather", WEATHER)
    assert forced(format, [weather], None) is None
    for name in ("wind", ANY):
        with pytest.raises(InvalidArgument, match="forces a call"):
            forced(format, [weather] if name else [], name)
    other = SHARED | {"$defs": {"City": {"enum": ["Rom"]}}}
    with pytest.raises(InvalidArgument, match="City differently"):
        forced(format, [tool("weather", SHARED), tool("wind", other)], ANY)
    with pytest.raises(InvalidArgument, match="no object"):
        forced(format, [tool("weather", WEATHER | {"$defs": [1]})], ANY)


J = '{"at": "Ulm"}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "wind", "arguments": {J}}}\n</tool_call>',
    "llama3_json": f'{{"name": "wind", "parameters": {J}}}',
    "json": f'{{"name": "wind", "arguments": {J}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "wind", "arguments": {J}}}]',
    "mistral_args": f"[TOOL_CALLS]wind[ARGS]{J}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.wind:0<|tool_call_argument_begin|>"
    f"{J}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>wind\n```json\n"
    f"{J}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>wind<｜tool▁sep｜>"
    f"{J}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": f"<|channel|>commentary to=functions.wind <|constrain|>json<|message|>{J}",
    "qwen3_coder": "<tool_call>\n<function=wind>\n<parameter=at>\nUlm\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>wind\n<arg_key>at</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>",
    "pythonic": "[wind(at='Ulm')]",
}


class Marked:
    """A tokenizer of single bytes that has the marks of a format as tokens: special ones, other added ones, or none."""

    def __init__(self, format: AnswerFormat, special: bool | None) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.encoder = Tokenizer(models.BPE({word: index for index, word in enumerate(alphabet)}, []))
        self.encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.encoder.decoder = decoders.ByteLevel()
        self.encoder.add_special_tokens([AddedToken("<eos>", special=True)])
        if special is not None:
            add = self.encoder.add_special_tokens if special else self.encoder.add_tokens
            add([AddedToken(mark, special=special) for mark in format.marks])
        self.end = self.encoder.token_to_id("<eos>")
        size, encoder = self.encoder.get_vocab_size(), self.encoder
        self._grammars = Grammars(lambda: encoder, fingerprint(encoder), size, [self.end])
        self._control_token = TokenDecoder(encoder).control_token

    def structure(
        self,
        format: AnswerFormat,
        name: str | None,
        own: StructuredOutput | None,
        end: str,
        tools: list[dict[str, Any]] = BOTH,
    ) -> Cursor:
        made = structure_of(format, tools, name, own, lambda: end, self._control_token)
        assert made is not None
        return self._grammars.compile(made).result().cursor()

    def takes(self, cursor: Cursor, text: str) -> bool:
        tokens = [*self.encoder.encode(text, add_special_tokens=False).ids, self.end]
        return all(allows(cursor.mask(tokens[:at]), token) for at, token in enumerate(tokens))


@cache
def marked(name: str, special: bool | None) -> tuple[AnswerFormat, Marked]:
    format = AnswerFormat(name, HARMONY if name == HARMONY else THINK, TOOLS)
    return format, Marked(format, special)


def thought(name: str) -> str:
    if name == HARMONY:
        return "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"
    return "<think>\nHm <b>.\n</think>\n\n"


def answered(name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if name == HARMONY else text


MARKS = pytest.mark.parametrize("special", [True, False, None], ids=["special", "added", "text"])


@MARKS
@pytest.mark.parametrize("name", HELD)
def test_a_forced_call_may_follow_reasoning_and_nothing_else(name: str, special: bool | None) -> None:
    format, model = marked(name, special)
    cursor = model.structure(format, ANY, OWN, PLAIN)
    assert model.takes(cursor, WRITTEN[name]) and model.takes(cursor, thought(name) + WRITTEN[name])
    for wrong in ("Sure", '{"a": 1}', answered(name, '{"a": 1}'), WRITTEN[name].replace("wind", "word")):
        assert not model.takes(cursor, wrong)
    if name != HARMONY:
        assert not model.takes(model.structure(format, ANY, None, CLOSED), thought(name) + WRITTEN[name])
        rest = thought(name).removeprefix("<think>")
        assert model.takes(model.structure(format, ANY, None, OPEN), rest + WRITTEN[name])


@MARKS
@pytest.mark.parametrize("name", WRITTEN)
def test_beside_a_structure_the_model_may_call_a_tool(name: str, special: bool | None) -> None:
    format, model = marked(name, special)
    cursor = model.structure(format, None, OWN, PLAIN)
    for text in (answered(name, '{"a": 1}'), WRITTEN[name]):
        assert model.takes(cursor, text) and model.takes(cursor, thought(name) + text)
    for wrong in ("Sure", answered(name, '{"b": 1}')):
        assert not model.takes(cursor, wrong)


OWNS = [
    (OWN, '{"a": 1}', '{"a": "x"}'),
    (StructuredOutput("json_object"), '{"b": [1]}', "[1]"),
    (StructuredOutput("regex", "a/[0-9]+\\/\n"), "a/12/\n", "a/x/\n"),
    (StructuredOutput("grammar", 'start: x "!"\nx: /[a-c]+/ | "<" x ">"\n'), "<ab>!", "ab"),
]


@pytest.mark.parametrize(("own", "good", "bad"), OWNS, ids=lambda each: getattr(each, "format", ""))
def test_each_kind_of_structure_may_follow_reasoning(own: StructuredOutput, good: str, bad: str) -> None:
    for special in (True, None):
        format, model = marked(HERMES, special)
        for end, before in ((PLAIN, ""), (PLAIN, "<think>Hm.</think>"), (OPEN, "Hm.</think>\n\n"), (CLOSED, "")):
            cursor = model.structure(format, None, own, end)
            assert model.takes(cursor, before + good) and not model.takes(cursor, before + bad)
            assert model.takes(cursor, before + WRITTEN[HERMES])


def test_without_reasoning_and_tools_a_structure_stays_as_it_is() -> None:
    for format in (AnswerFormat(), AnswerFormat("unknown", NONE, TOOLS)):
        assert structure_of(format, [], None, OWN, lambda: PLAIN, no_token) is OWN
    assert structure_of(AnswerFormat(NONE, THINK), [], None, OWN, lambda: CLOSED, no_token) is OWN


def test_masks_of_the_shipped_target_hold_a_call_too() -> None:
    structure = forced(AnswerFormat(HERMES, NONE, TOOLS), BOTH, "wind")
    assert structure is not None
    cursor, tokens = place(structure), [*tokenizer().encode(WRITTEN["hermes"]).ids, END]
    assert all(allows(cursor.mask(tokens[:at]), token) for at, token in enumerate(tokens))
