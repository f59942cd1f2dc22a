"""The requests of a load: a file of prompts, one a line, or one JSON object a line with its slice of the workload."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgument

KEYS = {"prompt", "workload", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the file."""

    prompt: str
    workload: str = ""
    """The slice that it belongs to; its figures are reported apart."""
    max_tokens: int | None = None
    """Output tokens; None takes the command's."""


def read_workload(path: Path, workload: str = "") -> list[Asked]:
    """A `.jsonl` file has lines {"prompt", "workload"?, "max_tokens"?}; any other file one prompt a line, with \\n for
    a line break, which all belong to `workload`. Raises InvalidArgument for a file that cannot be read or is empty, and
    for a line that is no such object."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}.", reason="BAD_WORKLOAD") from error
    if not lines:
        raise InvalidArgument(f"{path} holds no prompt.", reason="BAD_WORKLOAD")
    if path.suffix != ".jsonl":
        return [Asked(line.replace("\\n", "\n"), workload) for line in lines]
    return [_asked(line, f"line {number} of {path}", workload) for number, line in enumerate(lines, 1)]


def _asked(line: str, where: str, workload: str) -> Asked:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{where} is no JSON: {error}.", reason="BAD_WORKLOAD") from error
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str) or found.keys() - KEYS:
        raise InvalidArgument(f"{where} is no object of {', '.join(sorted(KEYS))}.", reason="BAD_WORKLOAD")
    most = found.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise InvalidArgument(f"max_tokens in {where} is no positive integer.", reason="BAD_WORKLOAD")
    if not isinstance(name := found.get("workload", workload), str):
        raise InvalidArgument(f"workload in {where} is no string.", reason="BAD_WORKLOAD")
    return Asked(found["prompt"], name, most)
