"""The format that an output must have: a JSON schema, regular expression, context-free grammar, or any JSON object."""

from __future__ import annotations

import json
from dataclasses import dataclass

from slipstream.errors import InvalidArgument

FORMATS = ("json_schema", "regex", "grammar", "json_object")
MAX_BYTES = 65_536
"""Most bytes of a format's text. Bounds the cost of compiling, above all the depth of nested rules
(`slipstream.tokenizer.grammar`)."""
BAD_GRAMMAR = "BAD_GRAMMAR"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A requested format. Raises InvalidArgument for a text that is too long."""

    format: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidArgument(f"structured output {self.format!r} is unknown; choose one of {FORMATS}.")
        size = len(self.text.encode())
        if size > MAX_BYTES:
            raise InvalidArgument(
                f"{self.format} has {size} bytes; send at most {MAX_BYTES}.", reason="GRAMMAR_TOO_LONG"
            )

    @property
    def schema(self) -> str:
        """The JSON schema of the two JSON formats. Raises InvalidArgument for a text that is not JSON."""
        if self.format == "json_object":
            return '{"type": "object"}'
        try:
            return json.dumps(json.loads(self.text))
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"json_schema is not JSON: {error}.", reason=BAD_GRAMMAR) from error
