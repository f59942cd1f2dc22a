"""Answers of the target with its hidden states, kept in two files that only grow: a run that was stopped while the
target wrote goes on behind the last whole answer.

`answers.jsonl` has a line that names the request and one for each answer; `states.bin` the states of all their tokens
as bfloat16 rows, which are read where they lie. Memory does not grow with the answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FINISHED = "finished"


@dataclass(frozen=True)
class StoredAnswer:
    part: str
    """`train` or `held_out`."""
    index: int
    """The prompt's index among those of its part."""
    tokens: list[int]
    """Prompt and answer."""
    first: int
    """Number of the answer's first token."""
    workload: str
    row: int
    """Row of the states of its first token; all its tokens but the last one have some."""

    @property
    def end(self) -> int:
        return self.row + len(self.tokens) - 1


class AnswerStore:
    def __init__(self, folder: Path, key: str, columns: int) -> None:
        """`columns`: numbers in a row of states. Answers of another key are thrown away, and what is half written."""
        self._lines, self._states = folder / "answers.jsonl", folder / "states.bin"
        self._columns, self._key = columns, key
        self._mapped: Tensor | None = None
        self.answers: list[StoredAnswer] = []
        self.finished: set[str] = set()
        """Parts to which nothing is added, however many prompts have no answer: what a run learns stays what it was."""
        folder.mkdir(parents=True, exist_ok=True)
        self._read()

    def _read(self) -> None:
        lines = self._lines.read_bytes().splitlines(keepends=True) if self._lines.is_file() else []
        rows = self._states.stat().st_size // (2 * self._columns) if self._states.is_file() else 0
        header = (json.dumps({"key": self._key, "columns": self._columns}) + "\n").encode()
        if not lines or lines[0] != header:
            self._lines.write_bytes(header)
            self._states.write_bytes(b"")
            return
        whole = len(header)
        for line in lines[1:]:
            if not self._take(line, rows):
                break
            whole += len(line)
        for path, size in ((self._lines, whole), (self._states, 2 * self._columns * self._rows)):
            with path.open("r+b") as file:
                file.truncate(size)

    def _take(self, line: bytes, rows: int) -> bool:
        """Whether the line is whole, and so are its states among the `rows` in the file."""
        try:
            content = json.loads(line)
        except ValueError:
            return False
        if content[0] == FINISHED:
            self.finished.add(content[1])
            return line.endswith(b"\n")
        answer = StoredAnswer(*content)
        if answer.end > rows or not line.endswith(b"\n"):
            return False
        self.answers.append(answer)
        return True

    @property
    def _rows(self) -> int:
        return self.answers[-1].end if self.answers else 0

    def part(self, name: str) -> list[StoredAnswer]:
        """In the order of their prompts."""
        return sorted((each for each in self.answers if each.part == name), key=lambda each: each.index)

    def add(self, part: str, index: int, tokens: list[int], first: int, workload: str, states: Tensor) -> StoredAnswer:
        """`states`: bfloat16 [tokens - 1, columns]."""
        answer = StoredAnswer(part, index, tokens, first, workload, self._rows)
        with self._states.open("ab") as file:
            file.write(states.contiguous().view(torch.int16).numpy().tobytes())
        with self._lines.open("a", encoding="utf-8") as lines:
            fields = [part, index, tokens, first, workload, answer.row]
            lines.write(json.dumps(fields) + "\n")
        self.answers.append(answer)
        self._mapped = None
        return answer

    def finish(self, part: str) -> None:
        """No answer is added to this part from now on."""
        if part not in self.finished:
            self.finished.add(part)
            with self._lines.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([FINISHED, part]) + "\n")

    def states(self, first: int, end: int, widths: Sequence[int]) -> list[Tensor]:
        """bfloat16 [rows, width] for each of the widths that a row consists of."""
        if self._mapped is None:
            mapped = np.memmap(self._states, dtype=np.int16, mode="r+", shape=(self._rows, self._columns))
            self._mapped = torch.from_numpy(mapped).view(torch.bfloat16)
        return list(self._mapped[first:end].split(list(widths), dim=-1))
