"""Base of all readers of answers: a reader takes text as it comes, in pieces of any size, and returns parts. These,
joined, do not depend on how the text was cut.

A reader is a coroutine over the text: it reads as if all of it were there, and waits where more has to come. It holds
back no more than the beginning of a mark, or of what may yet prove to be no call. Each character is read a bounded
number of times: a text that never closes a call is as long as its client wants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol, TypeVar, cast

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads on; gives way wherever it needs more text, or the end."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    name: str
    """Name of one of the request's tools."""
    id: str = ""
    """As the model wrote it; empty in formats without one."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments, a JSON object, of the call that began last. They end early where the text does, and are
    what the model wrote: a client has to expect what is no JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    pass


Part = str | Reasoning | CallBegan | Arguments | CallEnded
"""Text, or one of the others. Between CallBegan and CallEnded come Arguments alone."""
ENDED: Final = CallEnded()


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts, with neighbours of one kind joined."""
    for kind, group in groupby(parts, key=type):
        if kind is str:
            yield "".join(cast(Iterator[str], group))
        elif kind in (Reasoning, Arguments):
            yield kind("".join(part.text for part in cast(Iterator[Arguments], group)))
        else:
            yield from group


class NotACall(Exception):
    """The text that looked like a call is none, or no longer one."""


class Marks:
    """Strings of which none is the beginning of another one."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._longest = max(map(len, marks))
        self.pattern = re.compile("|".join(map(re.escape, marks)))
        firsts = "".join(re.escape(first) for first in sorted({mark[0] for mark in marks}))
        self.plain = re.compile(f"[^{firsts}]+")
        """Characters that begin no mark."""
        self.plain_line = re.compile(f"[^{firsts}\n]+")

    def held(self, text: str, at: int) -> int:
        """The first index from `at` on where a mark may have begun that the text does not end."""
        for index in range(max(at, len(text) - self._longest + 1), len(text)):
            if any(mark.startswith(text[index:]) for mark in self._marks):
                return index
        return len(text)


class AnswerReader(Protocol):
    def push(self, text: str) -> list[Part]:
        """Read on; returns what is certain now."""

    def finish(self) -> list[Part]:
        """The rest, once no more text can follow."""

    def run(self, text: str, at: int) -> int:
        """Characters from an index on for each of which `push` would return nothing, or each of which it would return
        as it is, as a part of the kind that came last; 0 where that is not known."""


class PlainReader:
    """Reads an answer without tools or reasoning: everything is text."""

    def __init__(self) -> None:
        self._began = False

    def push(self, text: str) -> list[Part]:
        self._began = self._began or bool(text)
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []

    def run(self, text: str, at: int) -> int:
        return len(text) - at if self._began else 0


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around reasoning, which comes before everything else."""

    begin: str
    end: str
    opened: bool = False
    """Whether the prompt ends with `begin`."""
    within: bool = False
    """Whether the text goes on from reasoning that the prompt has."""


class TextReader:
    """Reads reasoning and text. Readers of calls override `_answer`."""

    def __init__(self, names: Collection[str] = (), thoughts: Thoughts | None = None, *, single: bool = False) -> None:
        """`names`: of tools; a call of another one is text. `single`: calls behind the first one are left out."""
        self._names = names
        self._thoughts = thoughts
        self._within = thoughts is not None and thoughts.within
        self._single = single
        self._calls = 0
        self._calling = False
        self._text = ""
        self._at = 0
        """Where `_text` is read."""
        self._over = False
        self._parts: list[Part] = []
        self._last: type[object] | None = None
        """Kind of the last part."""
        self._run: re.Pattern[str] | None = None
        """Characters that `run` counts."""
        self._record: list[str] | None = None
        """Text read since a call may have begun: plain text, if it did not."""
        self._gap: list[str] = []
        """Space at the beginning, or behind a call: nothing, unless text follows."""
        self._blank = True
        """Whether nothing but space came since then."""
        self._lines: list[str] = []
        """Ends of lines in reasoning: nothing, unless reasoning follows."""
        self._steps = self._read()

    def push(self, text: str) -> list[Part]:
        self._text, self._at = self._text[self._at :] + text, 0
        return self._advance()

    def finish(self) -> list[Part]:
        self._over = True
        return self._advance()

    def run(self, text: str, at: int) -> int:
        if self._run is None or self._at < len(self._text):
            return 0
        found = self._run.match(text, at)
        return found.end() - at if found else 0

    def _advance(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Steps[None]:
        if self._thoughts is not None:
            yield from self._reason(self._thoughts)
        yield from self._answer()
        if self._last is None and self._gap:
            self._parts.append("".join(self._gap))

    def _reason(self, thoughts: Thoughts) -> Steps[None]:
        if not thoughts.within:
            self._record = []
            yield from self._blanks()
            if not (yield from self._literal(thoughts.begin)) and not thoughts.opened:
                self._record_as_text()
                return
            self._record = None
        marks = Marks(thoughts.end)
        yield from self._until(marks, self._think, marks.plain_line, Reasoning)
        yield from self._blanks()

    def _answer(self) -> Steps[None]:
        """Reads to the end of the text."""
        yield from self._until(_NONE, self._say, _NONE.plain, str)

    # Parts.

    def _say(self, text: str) -> None:
        if self._blank:
            if not text.strip():
                self._gap.append(text)
                return
            text, self._gap, self._blank = "".join((*self._gap, text)), [], False
        self._add(text)

    def _think(self, text: str) -> None:
        began = self._last is Reasoning or (self._last is None and self._within)
        text = text if began else text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            self._add(Reasoning("".join((*self._lines, kept))))
            self._lines = []
        if (kept or began) and len(kept) < len(text):
            self._lines.append(text[len(kept) :])

    def _begin_call(self, name: str, id: str = "") -> None:
        """Raises NotACall for a name that no tool has."""
        if name not in self._names:
            raise NotACall
        self._record, self._gap, self._blank, self._calling = None, [], True, True
        self._calls += 1
        self._add(CallBegan(name, id))

    def _argue(self, text: str) -> None:
        if text:
            self._add(Arguments(text))

    def _end_call(self) -> None:
        self._calling = False
        self._add(ENDED)

    def _add(self, part: Part) -> None:
        if self._single and self._calls > 1 and not isinstance(part, str | Reasoning):
            return
        self._parts.append(part)
        self._last = type(part)

    def _fell(self) -> None:
        """A call that began has ended with what the text had of it; one that did not begin is text."""
        if self._calling:
            self._end_call()
        else:
            self._record_as_text()

    def _record_as_text(self) -> None:
        record, self._record = self._record or [], None
        if record:
            self._say("".join(record))

    # Text.

    def _take(self, end: int) -> str:
        """The text up to an index, which is read."""
        taken = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(taken)
        return taken

    def _wait(self, run: re.Pattern[str] | None = None, kind: type[object] | None = None) -> Steps[None]:
        """`run`: characters of which each is a part of this kind, or causes none."""
        alone = kind is self._last and not self._lines and not (kind is str and self._blank)
        self._run = run if kind is None or alone else None
        yield
        self._run = None

    def _until(
        self,
        marks: Marks,
        add: Callable[[str], None],
        run: re.Pattern[str] | None = None,
        kind: type[object] | None = None,
    ) -> Steps[str]:
        """Add what comes before the next mark; returns the mark, which is read too, empty where the text ends first."""
        while True:
            if found := marks.pattern.search(self._text, self._at):
                if found.start() > self._at:
                    add(self._take(found.start()))
                return self._take(found.end())
            held = len(self._text) if self._over else marks.held(self._text, self._at)
            if held > self._at:
                add(self._take(held))
            if self._over:
                return ""
            yield from self._wait(run, kind)

    def _peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text):
            if self._over:
                return ""
            yield from self._wait()
        return self._text[self._at]

    def _literal(self, mark: str) -> Steps[bool]:
        """Whether the mark comes next, which is read then."""
        while True:
            found = self._text[self._at : self._at + len(mark)]
            if found == mark:
                self._take(self._at + len(mark))
                return True
            if self._over or not mark.startswith(found):
                return False
            yield from self._wait()

    def _expect(self, mark: str) -> Steps[None]:
        """Raises NotACall where something else comes next."""
        if not (yield from self._literal(mark)):
            raise NotACall

    def _blanks(self) -> Steps[None]:
        """Reads space."""
        while True:
            found = _SPACE.match(self._text, self._at)
            if found and found.end() > self._at:
                self._take(found.end())
            if self._at < len(self._text) or self._over:
                return
            yield from self._wait(_SPACE)

    def _skip_to(self, *marks: str) -> Steps[str]:
        """Leaves out what comes before a mark, and returns the mark; where none comes, that is text."""
        skipped = list[str]()
        found = Marks(*marks)
        mark = yield from self._until(found, skipped.append, found.plain)
        left = "".join(skipped).strip()
        if not mark and left:
            self._say(left)
        return mark


def drop(text: str) -> None:
    """Takes text that no part has."""


_SPACE = re.compile(r"\s*")
_NONE = Marks("\uffff\uffff")
"""A mark that no text has: U+FFFF is no character."""
