"""Files of what benchmarks measured: `benchmarks/results/NAME.md`, which is kept, and `NAME.json` for plots."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, str | float | int | None]


def write(name: str, command: str, rows: Sequence[Row], note: str = "") -> None:
    """One table: the command that made it, a note on where, then its rows. Also printed."""
    RESULTS.mkdir(exist_ok=True)
    record = {"command": command, "note": note, "rows": rows} if note else {"command": command, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    text = f"`{command}`\n\n" + (f"{note}\n\n" if note else "") + table(rows)
    (RESULTS / f"{name}.md").write_text(text)
    print(text, flush=True)


def in_a_name(words: str) -> str:
    """As part of a file's name."""
    return "_".join(re.findall("[a-z0-9]+", words.lower()))


def table(rows: Sequence[Row]) -> str:
    """Markdown. Columns are those of the first row."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
