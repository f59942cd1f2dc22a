"""Calls whose name stands between marks, with their arguments as JSON: DeepSeek V3 and V3.1, Kimi K2."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from gateway.text.answers.json_calls import JsonReader
from gateway.text.answers.reader import Marks, NotACall, Steps


class MarkedReader(JsonReader):
    """Between the marks around all calls, each call is a mark, its header, a mark, its arguments and a mark. The marks
    around all calls may be missing."""

    CALLS, CALL, JSON, CALL_END, CALLS_END = ("",) * 5
    marks: ClassVar[Marks]

    def __init_subclass__(cls) -> None:
        cls.marks = Marks(cls.CALLS, cls.CALL, cls.CALL_END, cls.CALLS_END)

    def _answer(self) -> Steps[None]:
        while mark := (yield from self._until(self.marks, self._say, self.marks.plain, str)):
            if mark != self.CALL:
                continue
            self._record = [mark]
            try:
                yield from self._call()
            except NotACall:
                calling = self._calling
                self._fell()
                if not calling:
                    continue
            yield from self._skip_to(self.CALL_END, self.CALLS_END)

    def _call(self) -> Steps[None]:
        header = list[str]()
        found = Marks(self.JSON, self.CALL_END)
        if (yield from self._until(found, header.append, found.plain)) != self.JSON:
            raise NotACall
        yield from self._behind_header("".join(header).strip())

    @abstractmethod
    def _behind_header(self, header: str) -> Steps[None]: ...


class DeepSeekReader(MarkedReader):
    """The header is the name (V3.1); or it is `function`, and the name stands on the line behind it (V3)."""

    CALLS, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    JSON = "<｜tool▁sep｜>"
    CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
    FENCE = "```"

    def _behind_header(self, header: str) -> Steps[None]:
        if header == "function" and header not in self._names:
            name = list[str]()
            yield from self._until(_LINE, name.append, _LINE.plain)
            yield from self._expect(self.FENCE + "json")
            header = "".join(name).strip()
        yield from self._object_call(header)
        yield from self._blanks()
        yield from self._literal(self.FENCE)


class KimiReader(MarkedReader):
    """The header is the call's id: `functions.NAME:INDEX`."""

    CALLS, CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
    JSON = "<|tool_call_argument_begin|>"
    CALL_END, CALLS_END = "<|tool_call_end|>", "<|tool_calls_section_end|>"

    def _behind_header(self, header: str) -> Steps[None]:
        found = _KIMI_ID.fullmatch(header)
        if found is None:
            raise NotACall
        yield from self._object_call(found[1], header)


_LINE = Marks("\n")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
