"""Calls of tools in a model's text. Each family of models writes them in a format of its own.

A reader is given the text as it comes, in pieces of any size, and returns text and calls: joined, they do not depend on
how the text was cut. A call that is no valid JSON is returned as the text that it is. Where a request forces a call,
`forced_call` holds the output to one call in the family's format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.tokenizer.structured_output import JSON_OPTIONS, OPTIONS_KEY, StructuredOutput, without_annotations

NONE = "none"
"""Reads an answer without tools."""
HERMES, LLAMA, MISTRAL = "hermes", "llama3_json", "mistral"
AUTO = "auto"
FORMATS = (AUTO, HERMES, LLAMA, MISTRAL)
BEGIN, END = "<tool_call>", "</tool_call>"
_MISTRAL_MARK = "[TOOL_CALLS]"


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_json)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object."""


Part = str | ToolCall


class AnswerReader(Protocol):
    """Reads each character a bounded number of times, whatever is held back: a text that never closes a call is as long
    as its client wants."""

    def push(self, text: str) -> list[Part]:
        """Read on; returns what is certain now."""

    def finish(self) -> list[Part]:
        """The rest, once no more text can follow."""

    def silent(self, text: str, at: int) -> int:
        """Characters from an index on for each of which `push` would return nothing; 0 where it may return something,
        or that is not known."""

    def certain(self, text: str, at: int) -> int:
        """Characters from an index on each of which `push` would return as it is, alone; 0 where that is not known."""


class PlainReader:
    """Reads an answer without tools: everything is text."""

    def push(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []

    def silent(self, text: str, at: int) -> int:
        return 0

    def certain(self, text: str, at: int) -> int:
        return len(text) - at


class HermesReader:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text, any number of times: Hermes,
    Qwen."""

    def __init__(self) -> None:
        self._held = ""
        """The beginning of BEGIN, perhaps."""
        self._space: list[str] = []
        """Space that came since a call: nothing, unless text follows."""
        self._called = False
        """Whether nothing but space came since a call."""
        self._call: list[str] | None = None
        """Pieces of the call that is open."""
        self._tail = ""
        """Its last characters, which may be the beginning of END."""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._call is None:
            text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            at = self._read_text(text, at, parts) if self._call is None else self._read_call(text, at, parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._call is not None:  # the end of the text may stand for the end of the call
            written = "".join(self._call)
            parts.append(_call(written) or BEGIN + written)
        else:
            self._add_text(self._held, parts)
        self._held, self._space, self._call = "", [], None
        return parts

    def silent(self, text: str, at: int) -> int:
        if self._call is None:
            return 0
        stop = self._end_of_call(text, at)
        return len(text) - at if stop < 0 else stop - 1 - at

    def certain(self, text: str, at: int) -> int:
        if self._held or self._called or self._call is not None:
            return 0
        mark = text.find(BEGIN[0], at)
        return (len(text) if mark < 0 else mark) - at

    def _read_text(self, text: str, at: int, parts: list[Part]) -> int:
        """Read from an index to the next call; returns the index behind what was read."""
        begin = text.find(BEGIN, at)
        if begin < 0:
            certain = max(at, _certain(text, BEGIN))
            self._held = text[certain:]
            self._add_text(text[at:certain], parts)
            return len(text)
        self._add_text(text[at:begin], parts)
        self._space, self._call, self._tail = [], [], ""
        return begin + len(BEGIN)

    def _read_call(self, text: str, at: int, parts: list[Part]) -> int:
        """As `_read_text`, to the end of the open call."""
        assert self._call is not None
        stop = self._end_of_call(text, at)
        if stop < 0:
            rest = text[at:]
            self._call.append(rest)
            self._tail = (self._tail + rest[-len(END) :])[1 - len(END) :]
            return len(text)
        self._call.append(text[at:stop])
        written, self._call = "".join(self._call), None
        call = _call(written[: -len(END)])
        self._called = call is not None
        parts.append(call or BEGIN + written)
        return stop

    def _end_of_call(self, text: str, at: int) -> int:
        """The index behind END, which may have begun before the text; -1 where the call goes on."""
        across = (self._tail + text[at : at + len(END) - 1]).find(END)
        if across >= 0:
            return at + across + len(END) - len(self._tail)
        end = text.find(END, at)
        return end + len(END) if end >= 0 else -1

    def _add_text(self, text: str, parts: list[Part]) -> None:
        """Space between calls, and behind the last one, is none of the text."""
        if not text:
            return
        if self._called and not text.strip():
            self._space.append(text)
            return
        parts.append("".join([*self._space, text]))
        self._space, self._called = [], False


class WholeReader:
    """An answer that is either text or calls, as its first character says: it is read at its end."""

    def __init__(self, begins: str, parse: Callable[[str], list[ToolCall]]) -> None:
        """`begins`: the first character of calls."""
        self._begins = begins
        self._parse = parse
        self._held: list[str] = []
        self._began = self._plain = False

    def push(self, text: str) -> list[Part]:
        if self._plain:
            return [text] if text else []
        self._held.append(text)
        if not self._began and (found := text.lstrip()):
            self._began, self._plain = True, not found.startswith(self._begins)
        if not self._plain:
            return []
        held, self._held = "".join(self._held), []
        return [held]

    def finish(self) -> list[Part]:
        held, self._held = "".join(self._held), []
        calls = [] if self._plain else self._parse(held.strip())
        if calls:
            return list(calls)
        return [held] if held else []

    def silent(self, text: str, at: int) -> int:
        return len(text) - at if self._began and not self._plain else 0

    def certain(self, text: str, at: int) -> int:
        return len(text) - at if self._plain else 0


def _llama_calls(text: str) -> list[ToolCall]:
    """`{"name": ..., "parameters": {...}}`, several with a semicolon between them. Empty for anything else."""
    calls, at = [], 0
    while at < len(text):
        value, at = _decoded(text, at)
        call = _as_call(value, marked=False)
        if call is None:
            return []
        calls.append(call)
        while at < len(text) and text[at] in "; \n\t\r":
            at += 1
    return calls


def _mistral_calls(text: str) -> list[ToolCall]:
    """`[{"name": ..., "arguments": {...}}, ...]`. Empty for anything else."""
    text = text.removeprefix(_MISTRAL_MARK).strip()
    value, at = _decoded(text, 0)
    if not isinstance(value, list) or text[at:].strip():
        return []
    calls = [call for each in value if (call := _as_call(each, marked=False))]
    return calls if len(calls) == len(value) else []


_READERS: Mapping[str, Callable[[], AnswerReader]] = {
    NONE: PlainReader,
    HERMES: HermesReader,
    LLAMA: lambda: WholeReader("{", _llama_calls),
    MISTRAL: lambda: WholeReader("[", _mistral_calls),
}


def new_reader(format: str) -> AnswerReader:
    """A reader of answers in this format. Raises KeyError for an unknown one."""
    return _READERS[format]()


def format_of(template: str, setting: str) -> str:
    """The format in which a model with this template writes its calls. Raises FailedPrecondition where it is not known,
    or the template takes no tools."""
    if "tools" not in template:
        raise FailedPrecondition("The model's chat template takes no tools.", reason="NO_TOOLS")
    if setting != AUTO:
        return setting
    if BEGIN in template and "<function=" not in template:
        return HERMES
    if _MISTRAL_MARK in template and "[ARGS]" not in template:
        return MISTRAL
    if "<|python_tag|>" in template or ("Environment: ipython" in template and '"parameters"' in template):
        return LLAMA
    raise FailedPrecondition(
        "The format in which this model calls tools is not known; the operator names one of "
        f"{', '.join(FORMATS[1:])} with GATEWAY_TOOL_CALLS, or send no tools.",
        reason="TOOL_FORMAT",
    )


def _call(text: str) -> ToolCall | None:
    value, at = _decoded(text.strip(), 0)
    return _as_call(value) if at == len(text.strip()) else None


def _as_call(value: Any, *, marked: bool = True) -> ToolCall | None:
    """`marked`: marks around it say that it is a call; else arguments have to, for any JSON object may have a name."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if not marked and not value.keys() & {"arguments", "parameters"}:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at an index, and the index behind it; None and the text's end without one."""
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text)


def _certain(text: str, mark: str) -> int:
    """Characters of a text that cannot be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)


ANY = ""
"""Name in place of a tool's: the model chooses among all."""
_SHARED = ("$defs", "definitions")
"""Parts of a schema that its references name from the root."""


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
        root = {each: schema.pop(each) for each in (*_SHARED, OPTIONS_KEY) if each in schema}
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1, **root}
    return StructuredOutput("json_schema", json.dumps(schema))


def _schema(functions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """JSON schema of one call, whose arguments stand in the field `arguments`."""
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for function in functions:
        parameters = dict(without_annotations(function.get("parameters") or {"type": "object"}))
        for part in _SHARED:
            found = parameters.pop(part, None) or {}
            if not isinstance(found, dict):
                raise InvalidArgument(f"{part} in a tool's parameters is no object.", reason="TOOL_CHOICE")
            for key, value in found.items():
                if shared.setdefault(part, {}).setdefault(key, value) != value:
                    raise InvalidArgument(
                        f"Two tools define {part}/{key} differently; name one in tool_choice.", reason="TOOL_CHOICE"
                    )
        fields = {"name": {"const": function["name"]}, arguments: parameters}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shared, OPTIONS_KEY: dict(JSON_OPTIONS)}
