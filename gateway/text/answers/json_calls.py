"""Calls as JSON objects: Hermes and Qwen (between `<tool_call>` marks), Llama 3 (with `parameters`), Mistral (a list,
or names and arguments apart)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.text.answers.reader import Arguments, Marks, NotACall, Steps, TextReader, drop

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r'[^\s,:"{}\[\]]+')
_NAME = re.compile(r"[\w.\-]*")
_CLOSING = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")

Add = Callable[[str], None]


@dataclass(slots=True)
class _Call:
    """Known parts of a call whose object is not at its end."""

    name: str | None = None
    held: list[str] | None = None
    """Arguments that came before the name."""
    began: bool = False


class JsonReader(TextReader):
    """Reads JSON as it comes: no mark inside of a string ends it."""

    def _json_call(self, *, marked: bool) -> Steps[None]:
        """One call. `marked`: marks around it say that it is a call; else arguments have to, for any JSON object may
        have a name. Raises NotACall where it is none, or breaks off."""
        call = _Call()
        yield from self._expect("{")
        yield from self._blanks()
        while (yield from self._peek()) != "}":
            key = yield from self._string()
            yield from self._blanks()
            yield from self._expect(":")
            yield from self._blanks()
            yield from self._member(call, key)
            yield from self._blanks()
            if not (yield from self._literal(",")):
                break
            yield from self._blanks()
        yield from self._expect("}")
        if not call.began:
            if call.name is None or not marked:
                raise NotACall
            self._begin_call(call.name)
            self._argue("{}")
        self._end_call()

    def _member(self, call: _Call, key: str) -> Steps[None]:
        """The value of a key of the call's object. Raises NotACall where it can be no call's."""
        if key == "name" and call.name is None:
            call.name = yield from self._string()
            if call.name not in self._names:
                raise NotACall
            if call.held is not None:
                self._begin_call(call.name)
                call.began = True
                self._argue("".join(call.held))
        elif key in _ARGUMENTS and not call.began and call.held is None:
            yield from self._arguments(call)
        else:
            yield from self._value(drop)

    def _arguments(self, call: _Call) -> Steps[None]:
        if (yield from self._peek()) != "{":
            raise NotACall
        if call.name is None:
            call.held = []
            yield from self._value(call.held.append)
        else:
            self._begin_call(call.name)
            call.began = True
            yield from self._value(self._argue)

    def _object_call(self, name: str, id: str = "") -> Steps[None]:
        """The arguments of a call, behind its name. Raises NotACall where no object comes, or breaks off."""
        yield from self._blanks()
        if name not in self._names or (yield from self._peek()) != "{":
            raise NotACall
        self._begin_call(name, id)
        yield from self._value(self._argue)
        self._end_call()

    def _value(self, add: Add) -> Steps[None]:
        """Adds one JSON value. Raises NotACall where it breaks off, or a bracket closes another one."""
        kind = Arguments if add == self._argue else None
        open: list[str] = []
        while True:
            character = yield from self._peek()
            if not character:
                raise NotACall
            if character == '"':
                yield from self._string_into(add, kind)
            elif character in _CLOSING:
                open.append(_CLOSING[character])
                add(self._take(self._at + 1))
            elif open and character == open[-1]:
                open.pop()
                add(self._take(self._at + 1))
            else:
                yield from self._between(add, kind, nested=bool(open))
            if not open:
                return

    def _between(self, add: Add, kind: type[object] | None, *, nested: bool) -> Steps[None]:
        """Reads the text between strings and brackets; alone, a number or a word. Raises NotACall without any."""
        pattern, some = _BETWEEN if nested else _SCALAR, False
        while True:
            if found := pattern.match(self._text, self._at):
                some = True
                add(self._take(found.end()))
            elif not some:
                raise NotACall
            if self._at < len(self._text) or self._over:
                return
            yield from self._wait(pattern, kind)

    def _string_into(self, add: Add, kind: type[object] | None) -> Steps[None]:
        """A string as it is written, quotes and all. Raises NotACall where it breaks off."""
        add(self._take(self._at + 1))
        while True:
            if found := _IN_STRING.match(self._text, self._at):
                add(self._take(found.end()))
            if self._at == len(self._text):
                if self._over:
                    raise NotACall
                yield from self._wait(_IN_STRING, kind)
            elif self._text[self._at] == '"':
                add(self._take(self._at + 1))
                return
            elif self._at + 1 < len(self._text):  # a backslash, and what it stands before
                add(self._take(self._at + 2))
            elif self._over:
                raise NotACall
            else:
                yield from self._wait()

    def _string(self) -> Steps[str]:
        """The value of a string. Raises NotACall for anything else."""
        if (yield from self._peek()) != '"':
            raise NotACall
        pieces = list[str]()
        yield from self._string_into(pieces.append, None)
        try:
            return str(json.loads("".join(pieces)))
        except ValueError as error:
            raise NotACall from error


class HermesReader(JsonReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text, any number of times."""

    def _answer(self) -> Steps[None]:
        mark = yield from self._next_call()
        while mark:
            self._record = [mark]
            try:
                yield from self._blanks()
                yield from self._json_call(marked=True)
            except NotACall:
                calling = self._calling
                self._fell()
                if not calling:
                    mark = yield from self._next_call()
                    continue
            mark = yield from self._skip_to(END, BEGIN)
            if mark == END:
                mark = yield from self._next_call()

    def _next_call(self) -> Steps[str]:
        return (yield from self._until(_HERMES, self._say, _HERMES.plain, str))


class JsonCallsReader(JsonReader):
    """`{"name": ..., "arguments": {...}}` or, as Llama 3 writes it, `{"name": ..., "parameters": {...}}`: where an
    answer begins with one, or behind `<|python_tag|>`. Several have a semicolon, a comma or space between them."""

    def _answer(self) -> Steps[None]:
        yield from self._calls_here(marked=False)
        while (yield from self._until(_PYTHON_TAG, self._say, _PYTHON_TAG.plain, str)):
            yield from self._calls_here(marked=True)

    def _calls_here(self, *, marked: bool) -> Steps[None]:
        while True:
            self._record = []
            try:
                yield from self._blanks()
                if self._calls:
                    for separator in (";", ","):
                        if (yield from self._literal(separator)):
                            yield from self._blanks()
                if not marked and (yield from self._literal(PYTHON_TAG)):
                    marked = True
                yield from self._json_call(marked=marked)
            except NotACall:
                self._fell()
                return


class MistralReader(JsonReader):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or each call as `[TOOL_CALLS]NAME[ARGS]{...}`. An answer
    that begins with such a list needs no mark."""

    def _answer(self) -> Steps[None]:
        self._record = []
        try:
            yield from self._blanks()
            if (yield from self._peek()) == "[" and not (yield from self._literal(TOOL_CALLS)):
                yield from self._list(marked=False)
            elif self._record and self._record[-1] == TOOL_CALLS:
                yield from self._behind_mark()
            else:
                raise NotACall
        except NotACall:
            self._fell()
        while mark := (yield from self._until(_TOOL_CALLS, self._say, _TOOL_CALLS.plain, str)):
            self._record = [mark]
            try:
                yield from self._behind_mark()
            except NotACall:
                self._fell()

    def _behind_mark(self) -> Steps[None]:
        yield from self._blanks()
        if (yield from self._peek()) == "[":
            yield from self._list(marked=True)
            return
        name = yield from self._name()
        if (yield from self._literal(CALL_ID)):
            yield from self._name()
        yield from self._literal(ARGS)
        yield from self._object_call(name)

    def _name(self) -> Steps[str]:
        pieces = list[str]()
        while (yield from self._peek()):
            found = _NAME.match(self._text, self._at)
            if found is None or found.end() == self._at:
                break
            pieces.append(self._take(found.end()))
        return "".join(pieces)

    def _list(self, *, marked: bool) -> Steps[None]:
        yield from self._expect("[")
        yield from self._blanks()
        while True:
            yield from self._json_call(marked=marked)
            self._record = []
            yield from self._blanks()
            if not (yield from self._literal(",")):
                break
            yield from self._blanks()
        yield from self._expect("]")
        self._record = None


_HERMES = Marks(BEGIN)
_PYTHON_TAG = Marks(PYTHON_TAG)
_TOOL_CALLS = Marks(TOOL_CALLS)
