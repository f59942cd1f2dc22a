"""gpt-oss's harmony: an answer is messages, each with a header that names its channel, and the function that it calls.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from gateway.text.answers.json_calls import JsonReader
from gateway.text.answers.reader import Arguments, Marks, NotACall, Reasoning, Steps, Thoughts

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_ANALYSIS = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")
_HEADER = Marks(START, CHANNEL)
_TEXT = Marks(MESSAGE)
_BODY = Marks(END, CALL, RETURN, START, CHANNEL)


class HarmonyReader(JsonReader):
    """The channel `analysis` is reasoning; `final`, and `commentary` that calls nothing, are text. A message to
    `functions.NAME` is a call. Text outside of messages is text."""

    _ended = ""
    """The mark that ended the prompt's last message."""

    def _reason(self, thoughts: Thoughts) -> Steps[None]:
        """Goes on with the analysis that the prompt has."""
        self._ended = yield from self._until(_BODY, self._think, _BODY.plain_line, Reasoning)

    def _answer(self) -> Steps[None]:
        mark = self._ended or (yield from self._until(_HEADER, self._say, _HEADER.plain, str))
        while mark:
            if mark in (START, CHANNEL):
                mark = yield from self._message(mark)
            else:
                self._blank = True
                mark = yield from self._until(_HEADER, self._say, _HEADER.plain, str)

    def _message(self, mark: str) -> Steps[str]:
        """Reads a message behind the mark that began it; returns the mark that ended it."""
        self._record, self._gap, self._blank = [mark], [], True
        pieces = [mark]
        if not (yield from self._until(_TEXT, pieces.append, _TEXT.plain)):
            self._record_as_text()
            return ""
        header = "".join(pieces)
        if called := _RECIPIENT.search(header):
            try:
                self._begin_call(called[1])
            except NotACall:
                self._record_as_text()
            else:
                mark = yield from self._until(_BODY, self._argue, _BODY.plain, Arguments)
                self._end_call()
                return mark
        self._record = None
        if _ANALYSIS.search(header):
            self._lines = ["\n"] if self._last is Reasoning else []
            return (yield from self._until(_BODY, self._think, _BODY.plain_line, Reasoning))
        return (yield from self._until(_BODY, self._say, _BODY.plain, str))
