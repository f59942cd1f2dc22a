"""Calls in XML, each argument between marks of its own: Qwen 3 Coder, GLM 4.5. Arguments become JSON as they come: a
text at once, anything else when it is whole."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from gateway.text.answers.json_calls import BEGIN, END
from gateway.text.answers.reader import Arguments, Marks, NotACall, Steps, TextReader, Thoughts, drop

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
STRING, NULL = "string", "null"
MOST_LITERAL = 10_000
"""Characters of a value that are read as Python's: more take milliseconds."""
MOST_REFERENCES = 16
"""Schemas that a reference leads to, one after the other."""
_WORDS = {"True": True, "False": False, "true": True, "false": False, "None": None}

Types = Mapping[str, Mapping[str, Collection[str]]]
"""The JSON types of each tool's parameters, by their names; none where the schema does not say."""


def types_of(parameters: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The types of the properties of a schema."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    root = parameters or {}
    return {str(name): sorted(_types(resolved(schema, root))) for name, schema in properties.items()}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the target of a schema's reference within the schema around it; the schema itself where it refers to
    nothing, or to nothing there is."""
    for _ in range(MOST_REFERENCES):
        name = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(name, str) or not name.startswith("#/"):
            break
        found: Any = root
        for part in name[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if found is None:
            break
        schema = found
    return schema


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    found = {each for each in ([given] if isinstance(given, str) else given or ()) if isinstance(each, str)}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            more = option.get("type") if isinstance(option, Mapping) else None
            found |= {more} if isinstance(more, str) else {"any"}
    values = schema.get("enum")
    if not found and isinstance(values, list) and all(isinstance(value, str) for value in values):
        found = {STRING}
    return found


class XmlReader(TextReader):
    def __init__(
        self, names: Collection[str] = (), thoughts: Thoughts | None = None, *, single: bool = False, types: Types
    ) -> None:
        super().__init__(names, thoughts, single=single)
        self._types = types
        self._name = ""
        self._arguments = 0
        """Arguments of the open call."""

    def _begin(self, name: str) -> None:
        self._begin_call(name)
        self._name, self._arguments = name, 0

    def _end(self) -> None:
        self._argue("}" if self._arguments else "{}")
        self._end_call()

    def _argument(self, key: str, end: Marks, *, lines: bool) -> Steps[None]:
        """The value of an argument, to its end. `lines`: it stands on lines of its own. Raises NotACall where the text
        ends first."""
        self._argue(("{" if not self._arguments else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._arguments += 1
        types = self._types.get(self._name, {}).get(key, ())
        if set(types) == {STRING}:
            yield from self._text_value(end, lines=lines)
            return
        pieces = list[str]()
        if not (yield from self._until(end, pieces.append, end.plain)):
            raise NotACall
        value = "".join(pieces)
        if lines:
            value = value.removeprefix("\n").removesuffix("\n")
        self._argue(json.dumps(_read(value, types), ensure_ascii=False))

    def _text_value(self, end: Marks, *, lines: bool) -> Steps[None]:
        began = False

        def add(text: str) -> None:
            nonlocal began
            if lines:
                text = text if began else text.removeprefix("\n")
                kept = text.removesuffix("\n")
                text, self._lines = "".join((*self._lines, kept)), ["\n"] if kept != text else []
            began = True
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])

        self._argue('"')
        self._lines = []
        ended = yield from self._until(end, add, _ALONE, Arguments)
        self._lines = []
        if not ended:
            raise NotACall
        self._argue('"')


class QwenCoderReader(XmlReader):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`; the outer marks may be
    missing."""

    def _answer(self) -> Steps[None]:
        mark = yield from self._until(_QWEN, self._say, _QWEN.plain, str)
        while mark:
            self._record = [mark]
            try:
                if mark == BEGIN:
                    yield from self._blanks()
                    yield from self._expect(FUNCTION)
                self._begin((yield from self._word()))
                yield from self._parameters()
            except NotACall:
                calling = self._calling
                self._fell()
                if not calling:
                    mark = yield from self._until(_QWEN, self._say, _QWEN.plain, str)
                    continue
            else:
                self._end()
                yield from self._blanks()
                yield from self._literal(END)
            mark = yield from self._until(_QWEN, self._say, _QWEN.plain, str)

    def _parameters(self) -> Steps[None]:
        """The parameters, and the end of the function."""
        while (yield from self._skip(_PARAMETERS)) == PARAMETER:
            key = yield from self._word()
            yield from self._argument(key, _PARAMETER_END, lines=True)

    def _skip(self, marks: Marks) -> Steps[str]:
        mark = yield from self._until(marks, drop, marks.plain)
        if not mark:
            raise NotACall
        return mark

    def _word(self) -> Steps[str]:
        """A name, up to `>`."""
        pieces = list[str]()
        if not (yield from self._until(_CLOSE, pieces.append, _CLOSE.plain)):
            raise NotACall
        return "".join(pieces).strip()


class GlmReader(XmlReader):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`."""

    def _answer(self) -> Steps[None]:
        while mark := (yield from self._until(_GLM, self._say, _GLM.plain, str)):
            self._record = [mark]
            try:
                yield from self._call()
            except NotACall:
                self._fell()

    def _call(self) -> Steps[None]:
        name = list[str]()
        mark = yield from self._until(_GLM_HEAD, name.append, _GLM_HEAD.plain)
        if not mark:
            raise NotACall
        self._begin("".join(name).strip())
        while True:
            if mark != KEY:
                skipped = Marks(KEY, END)
                mark = mark if mark == END else (yield from self._until(skipped, drop, skipped.plain))
            if mark != KEY:
                break
            key = list[str]()
            yield from self._until(_KEY_END, key.append, _KEY_END.plain)
            if not (yield from self._until(_VALUE, drop, _VALUE.plain)):
                raise NotACall
            yield from self._argument("".join(key).strip(), _VALUE_END, lines=False)
            mark = VALUE_END
        if not mark:
            raise NotACall
        self._end()


def _read(text: str, types: Collection[str]) -> Any:
    """The value that a model wrote, by the types that its schema allows."""
    if STRING in types:
        return None if NULL in types and text.strip() == NULL else text
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        pass
    word = text.strip()
    if word in _WORDS:
        return _WORDS[word]
    try:
        value = ast.literal_eval(word) if word[:1] in ("[", "{", "(") and len(word) < MOST_LITERAL else text
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_ALONE = re.compile(r'[^<"\\\x00-\x1f]+')
"""Characters of a text that stand so in JSON, and begin no mark."""
_QWEN = Marks(BEGIN, FUNCTION)
_PARAMETERS = Marks(PARAMETER, FUNCTION_END)
_PARAMETER_END = Marks(PARAMETER_END)
_CLOSE = Marks(">")
_GLM = Marks(BEGIN)
_GLM_HEAD = Marks("\n", KEY, END)
_KEY_END, _VALUE, _VALUE_END = Marks(KEY_END), Marks(VALUE), Marks(VALUE_END)
