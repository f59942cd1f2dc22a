"""What `slipstream bench` measured: as one JSON object, as tables, and as a page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.client.load.latencies import LATENCIES, Figures, LatencyObjectives, figures, seconds
from slipstream.client.load.machine import Disturbance
from slipstream.client.load.paired import paired_ratio
from slipstream.client.load.runner import Run

COMPARED = ("tokens_per_s", "goodput_per_s", "ttft_p50_ms", "tpot_p50_ms", "itl_p50_ms", "e2e_p50_ms", "e2e_p99_ms")
COLOURS = {"off": "#8a6d3b", "on": "#2563eb"}
WIDTH, HEIGHT, LEFT, BOTTOM = 420, 180, 36, 24
POINTS = 200
"""Most points of a curve: a page stays small however many requests there were."""
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.2rem .8rem;border-bottom:1px solid #d0d7de}
td,th{text-align:right}td:first-child,th:first-child{text-align:left}
svg{margin:.5rem 1rem .5rem 0}text{font-size:11px;fill:currentColor}
code{word-break:break-all}@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"""


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
    parts += [_curves(measured, latency) for latency in LATENCIES]
    for title, (names, *rows) in tables(found):
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in names)
        parts.append(f"<h2>{escape(title)}</h2><table><tr>{cells}</tr>{body}</table>")
    parts.append(
        "<p>Latencies count from the moment a request was due. TPOT is (E2E - TTFT) / (tokens - 1), ITL the gap "
        "between two arrivals of output; percentiles are by nearest rank. Intervals are Student's t on the logarithms "
        "of the pairs' ratios.</p>"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>slipstream bench</title><style>{STYLE}</style>'
    return head + "".join(parts) + "</html>\n"


def _curves(measured: BenchResult, latency: str) -> str:
    """The share of values below each latency, one line for each arm."""
    values = {arm: sorted(seconds(measured.pooled(arm).outcomes, latency)) for arm in measured.pairs[0].runs}
    most = max((column[-1] for column in values.values() if column), default=0.0)
    if most <= 0.0:
        return ""
    right, floor = WIDTH - LEFT - 12, HEIGHT - BOTTOM
    lines = [f'<path d="M{LEFT} 6V{floor}H{WIDTH - 12}" fill="none" stroke="currentColor" opacity=".5"/>']
    for index, (arm, column) in enumerate(values.items()):
        step = max(1, len(column) // POINTS)
        points = [(value, (rank + 1) / len(column)) for rank, value in enumerate(column)]
        points = [*points[:-1:step], *points[-1:]]
        drawn = " ".join(f"{LEFT + right * x / most:.1f},{floor - (floor - 6) * y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{drawn}" fill="none" stroke="{COLOURS[arm]}" stroke-width="2"/>')
        lines.append(f'<text x="{WIDTH - 60}" y="{floor - 10 - 14 * index}" style="fill:{COLOURS[arm]}">{arm}</text>')
    lines.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">0</text>')
    lines.append(f'<text x="{WIDTH - 80}" y="{HEIGHT - 6}">{1e3 * most:.4g} ms</text>')
    lines.append(f'<text x="2" y="14">100 %</text><text x="{LEFT + 8}" y="16">{latency.upper()}</text>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{latency}">{"".join(lines)}</svg>'


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
