"""Calls that a request forces: the output is held to one call of a tool, in the format of the model's family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.text.tool_calls import BEGIN, END, HERMES, LLAMA, MISTRAL
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.structured_output import StructuredOutput

ANY = ""
"""Name in place of a tool's: the model chooses among all."""
_SHARED = ("$defs", "definitions")
"""Parts of a schema that its references name from the root."""
_OPTIONS = "x-guidance"
_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""As `json.dumps` writes, which models are trained on. Where any space is allowed, a weak model writes nothing else."""


def forced_call(format: str, tools: Sequence[Mapping[str, Any]], name: str | None) -> StructuredOutput | None:
    """The language of one call. `tools`: as templates know them. `name`: the tool to call, or ANY; None where the model
    decides. Raises InvalidArgument for a tool that is not among them, and for schemas that exclude each other."""
    if name is None:
        return None
    functions = [tool["function"] for tool in tools if name in (ANY, tool["function"]["name"])]
    if not functions:
        wanted = f"no tool is called {name!r}" if name else "there are no tools"
        raise InvalidArgument(f"tool_choice forces a call, but {wanted}.", reason="TOOL_CHOICE")
    schema = _schema(functions, "parameters" if format == LLAMA else "arguments")
    if format == HERMES:
        grammar = f"start: {json.dumps(BEGIN)} /\\n/ call /\\n/ {json.dumps(END)}\ncall: %json {json.dumps(schema)}\n"
        return StructuredOutput("grammar", grammar)
    if format == MISTRAL:
        root = {each: schema.pop(each) for each in (*_SHARED, _OPTIONS) if each in schema}
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1, **root}
    return StructuredOutput("json_schema", json.dumps(schema))


def _schema(functions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """JSON schema of one call, whose arguments stand in the field `arguments`."""
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object"})
        for part in _SHARED:
            found = parameters.pop(part, None) or {}
            if not isinstance(found, dict):
                raise InvalidArgument(f"{part} in a tool's parameters is no object.", reason="TOOL_CHOICE")
            for key, value in found.items():
                if shared.setdefault(part, {}).setdefault(key, value) != value:
                    raise InvalidArgument(f"Two tools define {part}/{key} differently; name one in tool_choice.")
        fields = {"name": {"const": function["name"]}, arguments: parameters}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shared, _OPTIONS: _SPACING}
