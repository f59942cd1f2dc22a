"""Grammars of the shipped target's tokenizer, and what a text must be to be one of theirs by other means."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from slipstream.tokenizer.grammar import Cursor, Grammar, Grammars, Mask
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.tokenizer.vocabulary import fingerprint, load_tokenizer

TARGET = str(Path(__file__).resolve().parents[2] / "models/target")
VOCABULARY, END = 4096, 0
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "alphabet"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
SUM = 'start: term ("+" term)*\nterm: /[0-9]{1,4}/ | "(" start ")"'


def _fits_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    tags = {"alpha", "beta", "alphabet"}
    return (
        set(value) == {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and tags.issuperset(value["tags"])
    )


def _is_sum(text: str) -> bool:
    while (simpler := re.sub(r"\([0-9]{1,4}(\+[0-9]{1,4})*\)", "0", text)) != text:
        text = simpler
    return re.fullmatch(r"[0-9]{1,4}(\+[0-9]{1,4})*", text) is not None


@dataclass(frozen=True, slots=True)
class Language:
    structure: StructuredOutput
    holds: Callable[[str], bool]
    """Whether a text is of it, by means that have nothing to do with llguidance."""


def regex(pattern: str) -> Language:
    return Language(StructuredOutput("regex", pattern), lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None)


LANGUAGES = {
    "words": regex("(foo|bar|foobar){1,6}[0-9]{2}!"),
    "forced": regex("return ((the quick brown )?fox|self){2,5}"),
    "any": regex("[a-f ]{0,30}"),
    "unicode": regex("(é|日本|[x-z]){1,12}"),
    "schema": Language(StructuredOutput("json_schema", SCHEMA), _fits_schema),
    "sum": Language(StructuredOutput("grammar", SUM), _is_sum),
}

AMBIGUOUS = StructuredOutput("grammar", 'start: s\ns: s s s | s s | "a" | "b" |')
"""Each mask takes longer than the one before: a millisecond after 30 tokens, half a second after 250."""


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(TARGET)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer, fingerprint(tokenizer()), VOCABULARY, (END,))


def compiled(structure: StructuredOutput) -> Grammar:
    return grammars().compile(structure).result()


def place(structure: StructuredOutput) -> Cursor:
    return compiled(structure).cursor()


def allowed(mask: Mask | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(np.unpackbits(mask, count=VOCABULARY, bitorder="little")).tolist()


def spelled(tokens: list[int]) -> str:
    text: str = tokenizer().decode([token for token in tokens if token != END], skip_special_tokens=False)
    return text
