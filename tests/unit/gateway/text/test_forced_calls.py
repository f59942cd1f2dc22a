"""A forced call: whatever the masks let through is one call of a tool that was asked for, as its family writes it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.text.tool_calls import ANY, HERMES, LLAMA, MISTRAL, ToolCall, forced_call, new_reader
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.grammar import allows
from tests.grammars import END, allowed, place, spelled, tokenizer

CITY = {"enum": ["Bern", "Ulm"]}
WEATHER = {"type": "object", "properties": {"at": CITY}, "required": ["at"], "additionalProperties": False}
SHARED = {**WEATHER, "properties": {"at": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}}
FORMATS = (HERMES, LLAMA, MISTRAL)


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def drawn(format: str, tools: list[dict[str, Any]], name: str, seed: int) -> list[str | ToolCall]:
    """What a reader makes of a text that was drawn from the masks, which is as `json.dumps` spaces it."""
    structure = forced_call(format, tools, name)
    assert structure is not None
    cursor, rng, tokens = place(structure), random.Random(seed), list[int]()
    while END not in tokens:
        tokens.append(rng.choice(allowed(cursor.mask(tokens))))
    text = spelled(tokens[:-1])
    written = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert written == json.dumps(json.loads(written))
    reader = new_reader(format)
    return [*reader.push(text), *reader.finish()]


@pytest.mark.parametrize("parameters", [WEATHER, SHARED], ids=["plain", "references"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_text_of_the_language_is_one_call_of_a_tool_that_was_asked_for(
    format: str, parameters: dict[str, Any]
) -> None:
    tools = [tool("weather", parameters), tool("wind", parameters)]
    named = set[str]()
    for seed in range(12):
        for name in (ANY, "wind"):
            (call,) = drawn(format, tools, name, seed)
            assert isinstance(call, ToolCall) and json.loads(call.arguments)["at"] in CITY["enum"]
            assert call.name == "wind" or not name
            named.add(call.name)
    assert named == {"weather", "wind"}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"at": "Ulm"}}\n</tool_call>'),
        (LLAMA, '{"name": "weather", "parameters": {"at": "Ulm"}}'),
        (MISTRAL, '[{"name": "weather", "arguments": {"at": "Ulm"}}]'),
    ],
)
def test_a_call_as_models_write_it_is_of_the_language_and_a_word_before_it_is_not(format: str, text: str) -> None:
    structure = forced_call(format, [tool("weather", WEATHER)], ANY)
    assert structure is not None
    tokens = [*tokenizer().encode(text).ids, END]
    cursor = place(structure)
    assert all(allows(cursor.mask(tokens[:at]), token) for at, token in enumerate(tokens))
    assert not allows(place(structure).mask([]), tokenizer().encode("Sure").ids[0])


def test_a_choice_of_the_model_holds_it_to_nothing_and_an_impossible_one_is_refused() -> None:
    assert forced_call(HERMES, [tool("weather", WEATHER)], None) is None
    for name in ("wind", ANY):
        with pytest.raises(InvalidArgument, match="forces a call"):
            forced_call(HERMES, [tool("weather", WEATHER)] if name else [], name)
    other = SHARED | {"$defs": {"City": {"enum": ["Rom"]}}}
    with pytest.raises(InvalidArgument, match="City differently"):
        forced_call(HERMES, [tool("weather", SHARED), tool("wind", other)], ANY)
    with pytest.raises(InvalidArgument, match="no object"):
        forced_call(HERMES, [tool("weather", WEATHER | {"$defs": [1]})], ANY)
