"""Reports of `slipstream bench`: one JSON object, tables, and a page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from measurement.load.latencies import LATENCIES, Figures, LatencyObjectives, figures, seconds
from measurement.load.machine import Disturbance
from measurement.load.paired import paired_ratio
from measurement.load.runner import Run
from slipstream.html_page import Line, chart, page, table

COMPARED = ("tokens_per_s", "goodput_per_s", "ttft_p50_ms", "tpot_p50_ms", "itl_p50_ms", "e2e_p50_ms", "e2e_p99_ms")
POINTS = 200
"""Most points of a curve: a page stays small however many requests there were."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Runs of each arm, one directly after the other, and how disturbed the machine was meanwhile."""

    runs: dict[str, Run]
    machine: Disturbance


@dataclass(frozen=True, slots=True)
class BenchResult:
    command: str
    slices: list[str]
    """The workload of each request."""
    objectives: LatencyObjectives
    pairs: list[Pair]

    def pooled(self, arm: str, workload: str | None = None) -> Run:
        """All runs of an arm as one, of all requests or those of one slice."""
        runs = [pair.runs[arm] for pair in self.pairs]
        chosen = [outcome for run in runs for outcome in run.outcomes if workload in (None, self.slices[outcome.index])]
        return Run(chosen, sum(run.wall_s for run in runs))


def report(measured: BenchResult) -> dict[str, Any]:
    """The object that `--json` prints. Latencies in milliseconds; ratios are on / off."""
    arms = list(measured.pairs[0].runs)
    rows = [{arm: figures(run, measured.objectives) for arm, run in pair.runs.items()} for pair in measured.pairs]
    slices = sorted(set(measured.slices)) if len(set(measured.slices)) > 1 else []
    return {
        "command": measured.command,
        "objectives_ms": measured.objectives.given,
        "arms": {arm: figures(measured.pooled(arm), measured.objectives) for arm in arms},
        "slices": {
            name: {arm: figures(measured.pooled(arm, name), measured.objectives) for arm in arms} for name in slices
        },
        "on_off": _ratios(rows) if len(arms) == 2 else {},
        "pairs": [row | {"machine": asdict(pair.machine)} for row, pair in zip(rows, measured.pairs, strict=True)],
        "errors": _errors(pair.runs[arm] for pair in measured.pairs for arm in arms),
    }


def _ratios(rows: Sequence[dict[str, Figures]]) -> dict[str, Any]:
    found = {}
    for name in COMPARED:
        columns = [[row[arm].get(name) for row in rows] for arm in ("off", "on")]
        if all(value is not None for column in columns for value in column):
            off, on = ([float(value or 0.0) for value in column] for column in columns)
            if (ratio := paired_ratio(off, on)) is not None:
                found[name] = asdict(ratio)
    return found


def _errors(runs: Iterable[Run]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for outcome in (outcome for run in runs for outcome in run.outcomes if outcome.error is not None):
        sentence = f"{outcome.error.message} [{outcome.error.reason}]" if outcome.error else ""
        counts[sentence] = counts.get(sentence, 0) + 1
    return counts


def tables(found: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Titles and rows of cells; the first row is the head."""
    made = [("All requests", _columns(found["arms"]))]
    made += [(f"Workload {name or '(none)'}", _columns(arms)) for name, arms in found["slices"].items()]
    if found["on_off"]:
        rows = [["on / off", "ratio", "95 % interval", "pairs"]]
        for name, ratio in found["on_off"].items():
            interval = "-" if ratio["low"] is None else f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            rows.append([_title(name), f"{ratio['value']:.3f}", interval, str(ratio["pairs"])])
        made.append(("Speculation on against off, pair by pair", rows))
    head = ["pair", *(f"{arm}, tok/s" for arm in found["arms"]), "steal, %", "idle, %", "load"]
    rows = [head]
    for number, pair in enumerate(found["pairs"], 1):
        machine = pair["machine"]
        speeds = [_cell(pair[arm]["tokens_per_s"]) for arm in found["arms"]]
        noise = [_cell(machine[name]) for name in ("steal_percent", "idle_percent", "load")]
        rows.append([str(number), *speeds, *noise])
    made.append(("Pairs, and the machine of this command meanwhile", rows))
    if found["errors"]:
        made.append(("Failures", [["error", "requests"], *([e, str(n)] for e, n in found["errors"].items())]))
    return made


def text(found: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    for title, rows in tables(found):
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(rows[0]):
            table.add_column(name, justify="right" if index else "left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)


def html(measured: BenchResult, found: dict[str, Any]) -> str:
    """One page with its styles and drawings inside; it loads nothing."""
    parts = [f"<h1>slipstream bench</h1><p><code>{escape(measured.command)}</code></p>"]
    parts += [f"<h2>{name.upper()}: % up to it</h2>{chart(_curves(measured, name), 'ms')}" for name in LATENCIES]
    parts += [f"<h2>{escape(title)}</h2>{table(head, rows)}" for title, (head, *rows) in tables(found)]
    parts.append(
        "<p>Latencies count from the moment a request was due. TPOT is (E2E - TTFT) / (tokens - 1), ITL the gap "
        "between two arrivals of output; percentiles are by nearest rank. Intervals are Student's t on the logarithms "
        "of the pairs' ratios.</p>"
    )
    return page("slipstream bench", parts)


def _curves(measured: BenchResult, latency: str) -> list[Line]:
    """The share of values up to each latency, one line for each arm."""
    lines: list[Line] = []
    for arm in measured.pairs[0].runs:
        values = [1e3 * value for value in sorted(seconds(measured.pooled(arm).outcomes, latency))]
        points = [(value, 100.0 * (rank + 1) / len(values)) for rank, value in enumerate(values)]
        step = max(1, len(points) // POINTS)
        if points:
            lines.append((arm, [(0.0, 0.0), (values[0], 0.0), *points[:-1:step], points[-1]]))
    return lines


def _columns(arms: dict[str, Figures]) -> list[list[str]]:
    names = list(next(iter(arms.values())))
    return [["", *arms], *([_title(name), *(_cell(found[name]) for found in arms.values())] for name in names)]


def _title(name: str) -> str:
    for latency in LATENCIES:
        if name.startswith(f"{latency}_"):
            _, which, unit = name.split("_")
            return f"{latency.upper()} {which}, {unit}"
    return name.replace("_", " ").replace(" per s", " / s").replace(" ms", ", ms")


def _cell(value: float | int | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
