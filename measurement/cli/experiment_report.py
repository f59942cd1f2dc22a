"""Report of an experiment, as `slipstream compare` prints it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measurement.experiments.comparison import (
    ComparedLine,
    Prices,
    compare,
    number,
    reached,
    shadows,
    uneven,
    watched,
)
from measurement.experiments.estimates import Interval
from slipstream.v1 import gateway_pb2

COLUMN_WIDTH = 30


def experiment_text(
    experiment: gateway_pb2.GetExperimentResponse, prices: Prices | None, confidence: float
) -> Iterator[str]:
    yield f"experiment {experiment.name}: {experiment.arms_setting}"
    yield f"{100 * confidence:g} % intervals, over sessions"
    for arm in experiment.arms:
        yield f"  {arm.name}: {arm.begun} begun, {arm.finished} finished, {len(arm.samples)} of them measured here"
    for warning in uneven(experiment):
        yield f"WARNING: {warning}; find out why before you trust what follows."
    first = experiment.arms[0]
    compared = compare(experiment.arms, prices, confidence)
    for arm in experiment.arms[1:] or [first]:
        yield from _table(first.name, arm.name, compared[arm.name])
    for arm in experiment.arms:
        for name, lines in shadows(arm, confidence).items():
            yield from _table(f"served in {arm.name}", f"{name} (shadow)", lines)
    yield ""
    yield "share of rounds that accepted at least 1, 2, 3, ... candidates"
    for name, shares in _reached(experiment).items():
        yield f"  {name}: {' '.join(f'{share:.2f}' for share in shares) or 'none'}"


def _table(first: str, second: str, lines: Sequence[ComparedLine]) -> Iterator[str]:
    """Two columns and their difference; one column where an experiment has a single arm."""
    alone = first == second
    yield ""
    yield f"{'':22}{first:{COLUMN_WIDTH}}{'' if alone else f'{second:{COLUMN_WIDTH}}'}".rstrip()
    for line in lines:
        name = f"{line.metric.name}{f', {line.metric.unit}' if line.metric.unit else ''}"
        rest = "" if alone else f"{_interval(line.second):{COLUMN_WIDTH}}{line.conclusion(second)}"
        yield f"{name:22}{_interval(line.first):{COLUMN_WIDTH}}{rest}".rstrip()


def _interval(one: Interval) -> str:
    if math.isnan(one.value):
        return "-"
    ends = [number(end) if math.isfinite(end) else "-" for end in (one.low, one.high)]
    return f"{number(one.value)} ({' to '.join(ends)})"


def _reached(experiment: gateway_pb2.GetExperimentResponse) -> dict[str, list[float]]:
    found = {}
    for arm in experiment.arms:
        found[arm.name] = reached(arm.samples)
        for name in watched(arm):
            samples = [sample for sample in arm.samples if name in sample.shadows]
            found[f"{name} (shadow in {arm.name})"] = reached(samples, name)
    return found


def experiment_report(
    experiment: gateway_pb2.GetExperimentResponse, prices: Prices | None, confidence: float
) -> dict[str, Any]:
    """The object that `--json` prints; unknown numbers are null."""
    compared = compare(experiment.arms, prices, confidence)
    return {
        "experiment": experiment.name,
        "arms_setting": experiment.arms_setting,
        "confidence": confidence,
        "warnings": uneven(experiment),
        "arms": {
            arm.name: {
                "begun": arm.begun,
                "finished": arm.finished,
                "measured": len(arm.samples),
                "metrics": _lines(arm.name, compared[arm.name], against_itself=arm is experiment.arms[0]),
                "shadows": {name: _lines(name, lines) for name, lines in shadows(arm, confidence).items()},
            }
            for arm in experiment.arms
        },
        "reached": _reached(experiment),
    }


def _lines(name: str, lines: Sequence[ComparedLine], *, against_itself: bool = False) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for line in lines:
        found[line.metric.name] = {"unit": line.metric.unit, **_numbers(line.second)}
        if not against_itself:
            found[line.metric.name] |= {"difference": _numbers(line.difference), "verdict": line.conclusion(name)}
    return found


def _numbers(one: Interval) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in one._asdict().items()}
