"""Calls as a list of Python's, of Llama 3.2 and 4: `[get_weather(city='San Francisco', days=3), now()]`."""

from __future__ import annotations

import json
import re

from gateway.text.answers.reader import Arguments, Marks, NotACall, Steps, TextReader

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MOST_DEPTH = 64
"""Brackets inside of each other."""
_NAME = re.compile(r"[\w.\-]+")
_WORD = re.compile(r"[^\s,:=\"'()\[\]{}]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_STRINGS = {quote: re.compile(rf"[^{quote}\\\n]+") for quote in "'\""}
_ALONE = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f]+") for quote in "'\""}
"""Characters of a string that stand so in JSON."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "0": "\0", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_PYTHON = Marks(PYTHON_START)


class PythonicReader(TextReader):
    """An answer that begins with a list of calls, or one between `<|python_start|>` and `<|python_end|>`. Values become
    JSON as they come."""

    def _answer(self) -> Steps[None]:
        yield from self._calls_here()
        while (yield from self._until(_PYTHON, self._say, _PYTHON.plain, str)):
            yield from self._calls_here()

    def _calls_here(self) -> Steps[None]:
        self._record = []
        try:
            yield from self._blanks()
            yield from self._literal(PYTHON_START)
            yield from self._expect("[")
            while True:
                yield from self._blanks()
                yield from self._call()
                self._record = []
                yield from self._blanks()
                if not (yield from self._literal(",")):
                    break
            yield from self._expect("]")
            self._record = []
            yield from self._blanks()
            if (yield from self._literal(PYTHON_END)):
                self._record = None
            else:
                self._record_as_text()
        except NotACall:
            self._fell()

    def _call(self) -> Steps[None]:
        name = yield from self._token(_NAME)
        yield from self._expect("(")
        self._begin_call(name)
        yield from self._blanks()
        before = "{"
        while (yield from self._peek()) != ")":
            key = yield from self._token(_NAME)
            yield from self._blanks()
            yield from self._expect("=")
            self._argue(before + json.dumps(key, ensure_ascii=False) + ": ")
            before = ", "
            yield from self._value(0)
            yield from self._blanks()
            if not (yield from self._literal(",")):
                break
            yield from self._blanks()
        yield from self._expect(")")
        self._argue("{}" if before == "{" else "}")
        self._end_call()

    def _value(self, depth: int) -> Steps[None]:
        """A literal of Python's. Raises NotACall for anything else."""
        yield from self._blanks()
        first = yield from self._peek()
        if first in ("'", '"'):
            yield from self._string(first)
        elif first and first in "[(":
            yield from self._items("]" if first == "[" else ")", depth)
        elif first == "{":
            yield from self._dict(depth)
        else:
            word = yield from self._token(_WORD)
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise NotACall
            self._argue(_WORDS.get(word, word))

    def _items(self, close: str, depth: int) -> Steps[None]:
        yield from self._open("[", depth)
        before = ""
        while (yield from self._peek()) != close:
            self._argue(before)
            before = ", "
            yield from self._value(depth + 1)
            yield from self._blanks()
            if not (yield from self._literal(",")):
                break
            yield from self._blanks()
        yield from self._expect(close)
        self._argue("]")

    def _dict(self, depth: int) -> Steps[None]:
        yield from self._open("{", depth)
        before = ""
        while (quote := (yield from self._peek())) in ("'", '"'):
            self._argue(before)
            before = ", "
            yield from self._string(quote)
            yield from self._blanks()
            yield from self._expect(":")
            self._argue(": ")
            yield from self._value(depth + 1)
            yield from self._blanks()
            if not (yield from self._literal(",")):
                break
            yield from self._blanks()
        yield from self._expect("}")
        self._argue("}")

    def _open(self, bracket: str, depth: int) -> Steps[None]:
        if depth == MOST_DEPTH:
            raise NotACall
        self._take(self._at + 1)
        self._argue(bracket)
        yield from self._blanks()

    def _string(self, quote: str) -> Steps[None]:
        self._take(self._at + 1)
        self._argue('"')
        while (yield from self._peek_in(quote)) != quote:
            if found := _STRINGS[quote].match(self._text, self._at):
                self._argue(_in_json(self._take(found.end())))
            elif self._text[self._at] == "\\":
                self._argue(json.dumps((yield from self._escape()))[1:-1])  # two escapes may make one character
            else:  # the end of a line
                raise NotACall
        self._take(self._at + 1)
        self._argue('"')

    def _peek_in(self, quote: str) -> Steps[str]:
        """The next character of a string. Raises NotACall at the end of the text."""
        while self._at == len(self._text):
            if self._over:
                raise NotACall
            yield from self._wait(_ALONE[quote], Arguments)
        return self._text[self._at]

    def _escape(self) -> Steps[str]:
        self._take(self._at + 1)
        character = yield from self._peek()
        if not character:
            raise NotACall
        self._take(self._at + 1)
        if character not in _DIGITS:
            return _ESCAPES.get(character, "\\" + character)
        digits = ""
        while len(digits) < _DIGITS[character] and (yield from self._peek()):
            digits += self._take(self._at + 1)
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError) as error:
            raise NotACall from error

    def _token(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads text that matches the pattern. Raises NotACall where none does."""
        pieces = list[str]()
        while (yield from self._peek()) and (found := pattern.match(self._text, self._at)):
            pieces.append(self._take(found.end()))
        if not pieces:
            raise NotACall
        return "".join(pieces)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
