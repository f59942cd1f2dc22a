"""Grammars that constrain an output: a call that the request forces, in the format of the model's family; or the
request's own structure, beside which the model may still call a tool, and before which it may reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.text.answers import argument_grammar, formats, harmony, json_calls, marked_calls
from gateway.text.answers.formats import THOUGHTS, AnswerFormat
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.structured_output import JSON_OPTIONS, OPTIONS_KEY, StructuredOutput, supported_schema

ANY = ""
"""Name in place of a tool's: the model chooses among all."""
OPEN, CLOSED, PLAIN = "open", "closed", "plain"
"""Ends of a prompt: within reasoning, behind it, or with neither of its marks."""
_SHARED = ("$defs", "definitions")
"""Parts of a schema that its references name from the root."""
_APART = {
    formats.QWEN_CODER: argument_grammar.qwen_call,
    formats.GLM: argument_grammar.glm_call,
    formats.PYTHONIC: argument_grammar.python_call,
}
_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)

ControlToken = Callable[[str], int | None]
"""A mark -> its token, where it is a single one that no other text has."""
Tools = Sequence[Mapping[str, Any]]


def structure_of(
    format: AnswerFormat,
    tools: Tools,
    name: str | None,
    own: StructuredOutput | None,
    end: Callable[[], str],
    control_token: ControlToken,
) -> StructuredOutput | None:
    """Returns the structure that constrains the output; None for none. `tools`: as templates know them. `name`: the
    tool to call, or ANY; None where the model decides. `own`: the request's own structure, which a forced call
    replaces. `end`: how the prompt ends. Raises InvalidArgument for a tool that is not among them, and for schemas that
    exclude each other."""
    if name is None and (own is None or format.plain):
        return own
    notation = _Notation(control_token)
    if name is not None:
        options = [_Forced(notation, format.calls, _functions(tools, name)).rule()]
    else:
        assert own is not None
        options = [notation.rule("answer", _own(own)), *_free_call(notation, format, tools)]
    if format.thoughts == formats.HARMONY or format.calls == formats.HARMONY:
        return notation.structure(_in_channels(notation, options, forced=name is not None))
    thoughts = _thoughts(notation, format.thoughts, end) if format.thoughts in THOUGHTS else ""
    if not thoughts and len(notation.rules) == 1 and own is not None and name is None:
        return own
    return notation.structure(f"{thoughts} ({' | '.join(options)})")


class _Notation:
    """A grammar in Lark's notation, rule by rule."""

    def __init__(self, control_token: ControlToken) -> None:
        self._control_token = control_token
        self.rules: list[str] = []

    def rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def mark(self, text: str) -> str:
        token = self._control_token(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def text_to(self, mark: str) -> str:
        """Any text, and the mark behind it."""
        token = self._control_token(mark)
        if token is None:
            return self.rule(f"rest_{len(self.rules)}[suffix={json.dumps(mark)}]", "/(?s:.*)/").partition("[")[0]
        return f"{self.text()}? <[{token}]>"

    def text(self) -> str:
        rule = "TEXT: /(?s:.+)/"
        if rule not in self.rules:
            self.rules.append(rule)
        return "TEXT"

    def structure(self, start: str) -> StructuredOutput:
        return StructuredOutput("grammar", "\n".join((f"start: {start}", *self.rules, "")))


def _functions(tools: Tools, name: str) -> list[Mapping[str, Any]]:
    functions = [tool["function"] for tool in tools if name in (ANY, tool["function"]["name"])]
    if not functions:
        wanted = f"no tool is called {name!r}" if name else "there are no tools"
        raise InvalidArgument(f"tool_choice forces a call, but {wanted}.", reason="TOOL_CHOICE", field="tool_choice")
    return functions


@dataclass(frozen=True, slots=True)
class _Forced:
    """The language of one call."""

    notation: _Notation
    format: str
    functions: Sequence[Mapping[str, Any]]

    def rule(self) -> str:
        mark, format = self.notation.mark, self.format
        if format == formats.HERMES:
            call = self._object("arguments")
            return self._call(f"{mark(json_calls.BEGIN)} /\\n/ {call} /\\n/ {mark(json_calls.END)}")
        if format == formats.MISTRAL:
            return self._call(f"{mark(json_calls.TOOL_CALLS)} {self._object('arguments', listed=True)}")
        if format == formats.MISTRAL_ARGS:
            return self._named(json_calls.TOOL_CALLS, "{}", json_calls.ARGS)
        if format == formats.KIMI:
            kimi = marked_calls.KimiReader
            header = f"{mark(kimi.CALLS)} {mark(kimi.CALL)}", "functions.{}"
            return self._named(*header, kimi.JSON, index="/:[0-9]{1,4}/", end=(kimi.CALL_END, kimi.CALLS_END))
        if format in (formats.DEEPSEEK_V3, formats.DEEPSEEK_V31):
            return self._deepseek()
        if format in _APART:
            return self._call(_APART[format](self.notation, self.functions))
        if format == formats.HARMONY:
            to = f'{mark(harmony.CHANNEL)} "commentary to=functions."', "{}"
            return self._named(*to, harmony.MESSAGE, index=f'" " {mark(harmony.CONSTRAIN)} "json"')
        return self._call(self._object("parameters" if format == formats.LLAMA else "arguments"))

    def _deepseek(self) -> str:
        deepseek, mark = marked_calls.DeepSeekReader, self.notation.mark
        begin, end = f"{mark(deepseek.CALLS)} {mark(deepseek.CALL)}", (deepseek.CALL_END, deepseek.CALLS_END)
        if self.format == formats.DEEPSEEK_V31:
            return self._named(begin, "{}", deepseek.JSON, end=end)
        begin = f'{begin} "function" {mark(deepseek.JSON)}'
        fence = json.dumps(f"\n{deepseek.FENCE}json\n")
        return self._named(begin, "{}", "", index=fence, fence=json.dumps(f"\n{deepseek.FENCE}"), end=end)

    def _call(self, body: str) -> str:
        return self.notation.rule("call", body)

    def _object(self, arguments: str, *, listed: bool = False) -> str:
        schema = _schema(self.functions, arguments)
        if listed:
            root = {each: schema.pop(each) for each in (*_SHARED, OPTIONS_KEY) if each in schema}
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1, **root}
        return self.notation.rule("object", f"%json {json.dumps(schema)}")

    def _named(
        self, begin: str, header: str, json_mark: str, *, index: str = "", fence: str = "", end: Sequence[str] = ()
    ) -> str:
        """Calls whose name stands apart from the arguments. `begin`: a mark, or what is in the notation already."""
        mark, calls = self.notation.mark, list[str]()
        begin = mark(begin) if begin == json_calls.TOOL_CALLS else begin
        for number, function in enumerate(self.functions):
            schema = {OPTIONS_KEY: dict(JSON_OPTIONS), **_parameters(function)}
            arguments = self.notation.rule(f"arguments_{number}", f"%json {json.dumps(schema)}")
            name = json.dumps(header.format(function["name"]), ensure_ascii=False)
            calls.append(f"{name} {index} {mark(json_mark) if json_mark else ''} {arguments}")
        return self._call(f"{begin} ({' | '.join(calls)}) {fence} {' '.join(map(mark, end))}")


def _free_call(notation: _Notation, format: AnswerFormat, tools: Tools) -> list[str]:
    """Grammar of the beginning of a call. Its rest is the model's: nothing holds it to a schema where it may as well
    answer."""
    calls = format.calls
    if calls in (formats.NONE, formats.UNKNOWN):
        return []
    if calls in (formats.LLAMA, formats.JSON):
        return [_Forced(notation, calls, _functions(tools, ANY)).rule()]
    if calls == formats.PYTHONIC:
        names = " | ".join(json.dumps(name, ensure_ascii=False) for name in format.tools)
        return [notation.rule("call", f'"[" ({names}) "(" {notation.text()}')]
    if calls == formats.HARMONY:
        begin = f'{notation.mark(harmony.CHANNEL)} "commentary to=functions."'
    else:
        begin = notation.mark(formats.CALLS[calls].marks[0])
    marks = " | ".join(notation.mark(each) for each in format.marks if notation.mark(each).startswith("<["))
    more = f" (({marks}) {notation.text()}?)*" if marks else ""
    return [notation.rule("call", f"{begin} {notation.text()}?{more}")]


def _thoughts(notation: _Notation, format: str, end: Callable[[], str]) -> str:
    """Reasoning before the answer, as far as it is not behind the model already."""
    thoughts, place = THOUGHTS[format], end()
    if place == CLOSED:
        return ""
    rest = f"{notation.text_to(thoughts.end)} /\\n{{0,2}}/"
    return rest if place == OPEN else f"({notation.mark(thoughts.begin)} {rest})?"


def _in_channels(notation: _Notation, options: Sequence[str], *, forced: bool) -> str:
    """An answer of gpt-oss: reasoning, and one message to the client or to a tool, in channels of their own."""
    mark = notation.mark
    channel, message = mark(harmony.CHANNEL), mark(harmony.MESSAGE)
    thought = f'{channel} "analysis" {message} {notation.text_to(harmony.END)} {mark(harmony.START)} "assistant"'
    answer, *calls = options
    final = answer if forced else f'{channel} "final" {message} {answer}'
    return f"({thought})? ({' | '.join((final, *calls))})"


def _own(structure: StructuredOutput) -> str:
    """The request's structure in the notation."""
    if structure.format == "grammar":
        return f"%lark {{\n{structure.text}\n}}"
    if structure.format == "regex":
        return "/" + _ESCAPED.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), structure.text) + "/"
    return f"%json {structure.schema}"


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(supported_schema(function.get("parameters") or {"type": "object"}))


def _schema(functions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """JSON schema of one call, whose arguments stand in the field `arguments`."""
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for function in functions:
        parameters = _parameters(function)
        for part in _SHARED:
            found = parameters.pop(part, None) or {}
            if not isinstance(found, dict):
                raise InvalidArgument(
                    f"{part} in a tool's parameters is no object.", reason="TOOL_CHOICE", field="tool_choice"
                )
            for key, value in found.items():
                if shared.setdefault(part, {}).setdefault(key, value) != value:
                    raise InvalidArgument(
                        f"Two tools define {part}/{key} differently; name one in tool_choice.",
                        reason="TOOL_CHOICE",
                        field="tool_choice",
                    )
        fields = {"name": {"const": function["name"]}, arguments: parameters}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shared, OPTIONS_KEY: dict(JSON_OPTIONS)}
