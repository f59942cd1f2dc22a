"""The language of a forced call in formats that write each argument apart: Qwen 3 Coder's and GLM's XML, and Python.

Arguments come in the order of the schema. A text stands between marks as it is, so nothing but its end is known of it:
where a schema says more of one than its single values, the call is written as JSON (`writes`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from gateway.text.answers.json_calls import BEGIN, END
from gateway.text.answers.xml_calls import (
    FUNCTION,
    FUNCTION_END,
    KEY,
    KEY_END,
    NULL,
    PARAMETER,
    PARAMETER_END,
    STRING,
    VALUE,
    VALUE_END,
    resolved,
    types_of,
)
from slipstream.tokenizer.structured_output import JSON_OPTIONS, OPTIONS_KEY, supported_schema

_SHARED = ("$defs", "definitions")
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$comment"})
_OF_OBJECTS = _NOTES | {"type", "properties", "required", "additionalProperties", *_SHARED}
"""Keywords of the schema of a call's arguments that can be written argument by argument."""
_OF_TEXTS = _NOTES | {"type", "enum", "anyOf", "oneOf"}
_WORD = re.compile(r"[\w.\-]+")
_PYTHON = {"boolean": ("True", "False"), NULL: ("None",)}
_QUOTES = "'", '"'
_QUOTED = r"""/'([^'\\\n]|\\[nrt'"\\])*'/"""
"""A text in single quotes, in the notation."""
_NO_ESCAPE = re.compile(r"[^'\"\\\n]*")
"""Texts that stand as they are between quotes."""
_NO_MARK = re.compile(r"[^<>\n]+")
"""Texts that end no value."""


class Notation(Protocol):
    rules: list[str]

    def rule(self, name: str, body: str) -> str: ...
    def mark(self, text: str) -> str: ...
    def text_to(self, mark: str) -> str: ...


Functions = Sequence[Mapping[str, Any]]
"""The functions of tools, as templates know them."""


def writes(functions: Functions, *, python: bool) -> bool:
    """Whether calls of all of these can be held to their schemas with each argument apart; `python`: as Python's."""
    return all(_writes(each, python) for each in functions)


def _writes(function: Mapping[str, Any], python: bool) -> bool:
    schema = _parameters(function)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list) or schema.keys() - _OF_OBJECTS:
        return False
    if schema.get("type", "object") != "object" or not set(required) <= properties.keys():
        return False
    if not all(_WORD.fullmatch(each) for each in (function["name"], *properties)):
        return False
    types = types_of(schema)
    return python or all(_is_plain(resolved(each, schema), types[key]) for key, each in properties.items())


def _is_plain(schema: Any, types: Sequence[str]) -> bool:
    """Whether a value is JSON, or a text of which nothing but single values is said."""
    if STRING not in types:
        return True
    if schema.keys() - _OF_TEXTS:
        return False
    if not _has_types_alone(schema):
        return False
    values = schema.get("enum")
    return values is None or all(isinstance(each, str) and _NO_MARK.fullmatch(each) for each in values)


def qwen_call(notation: Notation, functions: Functions) -> str:
    """The body of a rule."""

    def argument(key: str, schema: Any, types: Sequence[str], root: Mapping[str, Any]) -> str:
        value = _xml_value(notation, schema, types, root, f"\n{PARAMETER_END}")
        return f"{_quoted(f'{PARAMETER}{key}>')} /\\n/ {value} /\\n/"

    def call(function: Mapping[str, Any], arguments: str) -> str:
        return f"{_quoted(FUNCTION + function['name'] + '>')} /\\n/ {arguments} {_quoted(FUNCTION_END)}"

    calls = _calls(functions, call, partial(_in_order, argument))
    return f"{notation.mark(BEGIN)} /\\n/ ({calls}) /\\n/ {notation.mark(END)}"


def glm_call(notation: Notation, functions: Functions) -> str:
    """The body of a rule."""

    def argument(key: str, schema: Any, types: Sequence[str], root: Mapping[str, Any]) -> str:
        name = f"{notation.mark(KEY)} {_quoted(key)} {notation.mark(KEY_END)}"
        return f"{name} /\\n/ {notation.mark(VALUE)} {_xml_value(notation, schema, types, root, VALUE_END)} /\\n/"

    def call(function: Mapping[str, Any], arguments: str) -> str:
        return f"{_quoted(function['name'])} /\\n/ {arguments}"

    calls = _calls(functions, call, partial(_in_order, argument))
    return f"{notation.mark(BEGIN)} ({calls}) {notation.mark(END)}"


def python_call(notation: Notation, functions: Functions) -> str:
    """The body of a rule."""

    def argument(key: str, schema: Any, types: Sequence[str], root: Mapping[str, Any]) -> str:
        value = _python_value(notation, schema, types, root)
        return f"{_quoted(f'{key}=')} {value}"

    def call(function: Mapping[str, Any], arguments: str) -> str:
        return f'{_quoted(function["name"] + "(")} {arguments} ")"'

    return f'"[" ({_calls(functions, call, partial(_listed, notation, argument))}) "]"'


def _python_value(notation: Notation, schema: Any, types: Sequence[str], root: Mapping[str, Any]) -> str:
    """Text in either quotes, and Python's words; what is nested, or has bounds, is JSON, which is read alike."""
    said = resolved(schema, root)
    if not isinstance(said, dict):
        return _json(notation, schema, root)
    values = said.get("enum")
    if values and not said.keys() - (_NOTES | {"type", "enum"}) and all(map(_is_quotable, values)):
        return f"({' | '.join(_quoted(mark + each + mark) for each in values for mark in _QUOTES)})"
    if said.keys() - _OF_TEXTS or "enum" in said or not _has_types_alone(said) or not types or "any" in types:
        return _json(notation, schema, root)
    options = [_quoted(word) for each in types for word in _PYTHON.get(each, ())]
    options += [_QUOTED] if STRING in types else []
    if others := [each for each in types if each not in _PYTHON]:
        options.append(_json(notation, {"type": others}, root))
    return f"({' | '.join(options)})"


def _is_quotable(value: Any) -> bool:
    return isinstance(value, str) and _NO_ESCAPE.fullmatch(value) is not None


def _has_types_alone(schema: Mapping[str, Any]) -> bool:
    """Whether the options of a schema say nothing but their types."""
    options = schema.get("anyOf") or schema.get("oneOf") or []
    return all(isinstance(each, dict) and not each.keys() - (_NOTES | {"type"}) for each in options)


Argument = Callable[[str, Any, Sequence[str], Mapping[str, Any]], str]
"""Name, schema, types and the schema around it -> the argument in the notation."""


def _calls(
    functions: Functions,
    call: Callable[[Mapping[str, Any], str], str],
    arguments: Callable[[Mapping[str, Any]], str],
) -> str:
    return " | ".join(call(each, arguments(_parameters(each))) for each in functions)


def _arguments(argument: Argument, schema: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each argument in the notation, and whether it has to be there."""
    types, required = types_of(schema), schema.get("required") or ()
    properties = schema.get("properties") or {}
    return [(argument(key, each, types[key], schema), key in required) for key, each in properties.items()]


def _in_order(argument: Argument, schema: Mapping[str, Any]) -> str:
    return " ".join(made if needed else f"({made})?" for made, needed in _arguments(argument, schema))


def _listed(notation: Notation, argument: Argument, schema: Mapping[str, Any]) -> str:
    """With commas between them, whichever are left out."""
    first, more = '""', '""'  # from an argument on, where none and where some stand before it
    for made, needed in reversed(_arguments(argument, schema)):
        here = notation.rule(_fresh(notation, "argument"), made)
        first = f"{here} {more}" if needed else f"({here} {more} | {first})"
        more = f'", " {here} {more}' if needed else f'(", " {here})? {more}'
        first, more = (notation.rule(_fresh(notation, "arguments"), each) for each in (first, more))
    return first


def _xml_value(notation: Notation, schema: Any, types: Sequence[str], root: Mapping[str, Any], end: str) -> str:
    """A value, and the mark behind it."""
    if STRING not in types:
        return f"{_json(notation, schema, root)} {_end(notation, end)}"
    values = resolved(schema, root).get("enum")
    if values is None:
        return notation.text_to(end)
    return f"({' | '.join(map(_quoted, values))}) {_end(notation, end)}"


def _end(notation: Notation, end: str) -> str:
    """`end` may have a line before the mark."""
    return f"/\\n/ {notation.mark(end[1:])}" if end[0] == "\n" else notation.mark(end)


def _json(notation: Notation, schema: Any, root: Mapping[str, Any]) -> str:
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    shared = {name: root[name] for name in _SHARED if name in root}
    written = {OPTIONS_KEY: dict(JSON_OPTIONS), **schema, **shared}
    return notation.rule(_fresh(notation, "value"), f"%json {json.dumps(written)}")


def _fresh(notation: Notation, name: str) -> str:
    """A rule's name that no other rule has."""
    return f"{name}_{len(notation.rules)}"


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(supported_schema(function.get("parameters") or {"type": "object"}))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
