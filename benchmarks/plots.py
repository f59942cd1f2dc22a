"""Draws what was measured: plots beside the tables in `benchmarks/results/`.

usage: python -m benchmarks.plots       (after `delay`, `load` and `ablation`)
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import matplotlib

from benchmarks.records import RESULTS, Row

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "slipstream", "axes.grid": True, "grid.alpha": 0.3})

from matplotlib import pyplot  # noqa: E402  (after the choice of what draws)


def rows(name: str) -> list[Row]:
    """The rows of a result; none if it was not measured."""
    path = RESULTS / f"{name}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def draw(name: str, title: str, x: str, y: str, lines: Iterable[tuple[str, list[tuple[float, float]]]]) -> None:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for label, points in lines:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    print(RESULTS / f"{name}.svg")


def lines(measured: list[Row], key: str, x: str, y: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """One line for each value of `key`, in the order of appearance."""
    grouped: dict[str, list[tuple[float, float]]] = {}
    for row in measured:
        horizontal, vertical = row[x], row[y]
        if horizontal is not None and vertical is not None:
            grouped.setdefault(str(row[key]), []).append((float(horizontal), float(vertical)))
    return list(grouped.items())


def main() -> None:
    for kind, title in (("emulated", "20 ms a pass, 2 ms a draft pass"), ("real", "shipped pair, target of 300 M")):
        if measured := rows(f"delay_{kind}"):
            some = lines(measured, "mode", "delay_ms", "tokens_per_s")
            draw(f"delay_{kind}", f"One session, {title}", "one-way delay, ms", "tokens / s", some)
    for kind in ("inflated", "shipped"):
        if measured := rows(f"load_{kind}"):
            points = [(float(row["at once"] or 0), float(row["on / off"] or 0)) for row in measured]
            some = [("speculation on / off", points), ("no change", [(x, 1.0) for x, _ in points])]
            draw(f"load_{kind}", f"Throughput, {kind} target", "requests at once", "on / off", some)
    for temperature in (0.0, 1.0):
        if measured := [row for row in rows("ablation") if row["T"] == temperature]:
            some = lines(measured, "variant", "nodes", "tokens / pass")
            draw(f"ablation_{temperature:g}", f"T = {temperature:g}", "nodes verified", "tokens / pass", some)


if __name__ == "__main__":
    main()
