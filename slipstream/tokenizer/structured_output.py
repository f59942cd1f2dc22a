"""The format that an output must have: a JSON schema, regular expression, context-free grammar, or any JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import VALUE_UNKNOWN, InvalidArgument

FORMATS = ("json_schema", "regex", "grammar", "json_object")
MAX_BYTES = 65_536
"""Most bytes of a format's text. Bounds the cost of compiling, above all the depth of nested rules
(`slipstream.tokenizer.grammar`)."""
BAD_GRAMMAR = "BAD_GRAMMAR"
OPTIONS_KEY = "x-guidance"
"""Key at a schema's root under which it sets the library's options itself, in place of JSON_OPTIONS."""
JSON_OPTIONS: Mapping[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""Where JSON has space: as `json.dumps` writes it, which models are trained on. Where any space is allowed, a weak
model writes nothing else."""
FORMATS_OF_STRINGS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Those that the library constrains."""
_VALUES = frozenset(("const", "enum", "default", "example", "examples"))
"""Keys of a schema that hold values and no schemas."""
_SAYS_NOTHING = frozenset(("title", "description", "$schema", "$id", "default", "example", "examples"))
"""Those that hold nothing to anything."""
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Those that hold schemas by name."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A requested format. Raises InvalidArgument for a text that is too long."""

    format: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidArgument(
                f"structured output {self.format!r} is unknown; choose one of {FORMATS}.",
                reason=VALUE_UNKNOWN,
                field="structured_output",
            )
        size = len(self.text.encode())
        if size > MAX_BYTES:
            raise InvalidArgument(
                f"{self.format} has {size} bytes; send at most {MAX_BYTES}.",
                reason="GRAMMAR_TOO_LONG",
                field="structured_output",
            )

    @property
    def schema(self) -> str:
        """The JSON schema of the two JSON formats. Raises InvalidArgument for a text that is not JSON.

        A `format` that is not in FORMATS_OF_STRINGS is left out: it is an annotation then (JSON Schema 2020-12,
        validation, 7.2.3), as pydantic and zod write for paths and bytes."""
        try:
            schema = {"type": "object"} if self.format == "json_object" else supported_schema(json.loads(self.text))
            return json.dumps({OPTIONS_KEY: JSON_OPTIONS, **schema} if isinstance(schema, dict) else schema)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"json_schema is not JSON: {error}.", reason=BAD_GRAMMAR, field="structured_output"
            ) from error


def whitespace_options(pattern: str) -> dict[str, Any]:
    """JSON_OPTIONS of a schema that allows whitespace that matches `pattern` between JSON's tokens."""
    return {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True, "whitespace_pattern": pattern}


def choice_grammar(texts: list[str]) -> str:
    """The grammar of one of these texts. Raises InvalidArgument without any, and for an empty one."""
    if not texts or not all(texts):
        raise InvalidArgument(
            "choice holds one text at least, and none of them is empty.", reason=BAD_GRAMMAR, field="structured_output"
        )
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def supported_schema(schema: Any, names: bool = False, root: Any = None) -> Any:
    """`schema` in keys that the library has: without formats of strings that nothing constrains, and with
    `propertyNames` as properties. `names`: its keys are names of properties; `root`: of references, None for `schema`
    itself."""
    root = schema if root is None else root
    if isinstance(schema, list):
        return [supported_schema(each, root=root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if not names and "propertyNames" in schema:
        schema = _with_names(schema, root)
    kept = {}
    for key, value in schema.items():
        if names:
            kept[key] = supported_schema(value, root=root)
        elif key in _VALUES:
            kept[key] = value
        elif key != "format" or value in FORMATS_OF_STRINGS or not isinstance(value, str):
            kept[key] = supported_schema(value, names=key in _NAMED, root=root)
    return kept


def _with_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """An object's schema whose names are written as properties, where they are any strings, some, or a pattern's: as
    zod writes `z.record` and pydantic a dict of an enumeration. Any other stays, and is refused."""
    said, rest = schema["propertyNames"], {key: value for key, value in schema.items() if key != "propertyNames"}
    if isinstance(said, dict) and isinstance(reference := said.get("$ref"), str):
        said = root
        for part in reference.removeprefix("#/").split("/"):
            said = said.get(part) if isinstance(said, dict) else None
    if not isinstance(said, dict) or said.get("type", "string") != "string":
        return schema
    asked = said.keys() - {"type", *_SAYS_NOTHING}
    if not asked:
        return rest
    if "properties" in schema or "patternProperties" in schema:
        return schema
    value = schema.get("additionalProperties", True)
    if asked == {"pattern"}:
        return rest | {"patternProperties": {said["pattern"]: value}, "additionalProperties": False}
    if asked == {"enum"} and isinstance(said["enum"], list):
        named = {name: value for name in said["enum"] if isinstance(name, str)}
        return rest | {"properties": named, "additionalProperties": False}
    return schema
