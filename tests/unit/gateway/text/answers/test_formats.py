"""The formats are read off chat templates, and ids and messages fit them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from gateway.text.answers.formats import (
    AUTO,
    CALLS,
    GLM,
    HARMONY,
    HERMES,
    JSON,
    KIMI,
    LLAMA,
    MISTRAL,
    MISTRAL_THINK,
    NONE,
    SEED_THINK,
    THINK,
    UNKNOWN,
    AnswerFormat,
    answer_format,
    call_format,
    fitting,
    nine_characters,
    thought_format,
)
from gateway.text.answers.reader import CallBegan
from gateway.text.answers.xml_calls import types_of
from gateway.text.chat_messages import REASONING, as_template_reads
from slipstream.errors import FailedPrecondition
from tests.support.model_answers import TEMPLATES

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_calls_is_read_off_the_template(name: str) -> None:
    assert call_format("{{ tools }}" + TEMPLATES[name], AUTO) == name
    assert call_format("{{ tools }}" + TEMPLATES[name], KIMI) == KIMI
    with pytest.raises(FailedPrecondition, match="takes no tools"):
        call_format(TEMPLATES[name], AUTO)


def test_every_format_has_a_template_and_llama_three_two_needs_no_tag() -> None:
    assert set(TEMPLATES) == {*CALLS, UNKNOWN}
    assert call_format('{{ tools }}Environment: ipython {"name": function name, "parameters": ...}', AUTO) == LLAMA


def test_the_marks_of_reasoning_are_read_off_the_template() -> None:
    assert thought_format("{% if '</think>' in content %}") == THINK
    assert thought_format("[THINK]...[/THINK]") == MISTRAL_THINK
    assert thought_format("<seed:think></seed:think>") == SEED_THINK
    assert thought_format("<|channel|>analysis<|message|>") == HARMONY
    assert thought_format("<|im_start|>") == NONE


def test_a_forced_call_is_json_where_the_format_has_none_to_hold_it_to() -> None:
    settings = (AUTO, AUTO)
    for name, template in TEMPLATES.items():
        made = answer_format("{{ tools }}" + template, [TOOL], settings, forced=True)
        assert made.calls == (JSON if name == UNKNOWN else name)
        assert answer_format("{{ tools }}" + template, [TOOL], settings).calls == name
        assert answer_format(template, [], settings).calls == NONE
    assert answer_format("{{ tools }}" + TEMPLATES[UNKNOWN], [TOOL], settings).plain
    assert answer_format("{{ tools }}" + TEMPLATES[GLM], [TOOL], settings).tools == {"weather": {"at": ["string"]}}
    assert answer_format("{{ tools }}" + TEMPLATES[HERMES], [TOOL], settings).tools == {"weather": {}}


def test_a_format_survives_its_record_and_no_other_one_is_read() -> None:
    adapter, made = TypeAdapter(AnswerFormat), AnswerFormat(GLM, THINK, {"weather": {"at": ["string"]}}, True)
    assert adapter.validate_json(adapter.dump_json(made)) == made
    for wrong in ({"calls": "x"}, {"thoughts": "x"}):
        with pytest.raises(ValueError, match="no format"):
            AnswerFormat(**wrong)


def test_ids_of_calls_have_the_form_of_their_model_family() -> None:
    call = CallBegan("weather")
    assert AnswerFormat(HERMES).call_id("abc", 1, call) == "call_abc_1"
    mistral = [AnswerFormat(MISTRAL).call_id("abc", index, call) for index in range(50)]
    assert len(set(mistral)) == 50 and all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in mistral)
    assert AnswerFormat(KIMI).call_id("abc", 0, CallBegan("weather", "functions.weather:3")) == "functions.weather:3"
    assert nine_characters(mistral[0]) == mistral[0] and nine_characters("call_1") == nine_characters("call_1")


CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"at": "Ärö"}}}
SAID = [
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALLED]},
    {"role": "tool", "content": "21", "tool_call_id": "call_1"},
]


def fitted(messages: Sequence[Any], template: str) -> list[Any]:
    fit = fitting(template)
    return [*messages] if fit is None else [*map(fit, messages)]


def test_messages_of_a_conversation_fit_the_template() -> None:
    assert fitting(TEMPLATES[HERMES]) is None
    called, result = fitted(SAID, TEMPLATES[MISTRAL])
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == nine_characters("call_1")
    assert as_template_reads(fitted(SAID, TEMPLATES[HARMONY])[0])["thinking"] == "Hm."
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert as_template_reads(fitted([said], TEMPLATES[HARMONY])[0])["thinking"] == "Hm."
    assert not {*REASONING} & {*as_template_reads(fitted([SAID[0] | said], TEMPLATES[HARMONY])[0])}
    joins = "{{ '<x>' + tool['function']['name'] + '<y>' + tool['function']['arguments'] + '<z>' }}"
    called, _ = fitted(SAID, joins)
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"at": "Ärö"} and called["content"] == ""
    assert fitted(SAID, "{{ '<y>' + tool['function']['arguments'] | tojson + '<z>' }}") == SAID


def test_types_of_parameters_are_read_off_schemas() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["integer", "null"]},
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "d": {"enum": ["x", "y"]},
        "e": {"$ref": "#/$defs/E"},
        "f": True,
        "g": {"oneOf": [{"$ref": "#"}, {"type": "string"}]},
    }
    assert types_of({"properties": properties}) == {
        "a": ["string"],
        "b": ["integer", "null"],
        "c": ["null", "string"],
        "d": ["string"],
        "e": [],
        "f": [],
        "g": ["any", "string"],
    }
    assert types_of(None) == types_of({"properties": 3}) == {}
