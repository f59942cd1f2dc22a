"""The report of a training run: one HTML file without anything from elsewhere, and the verdict in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from measurement.pairs.verdict import PairFigures
from slipstream.html_page import Line, chart, page, table
from training.acceptance import SimulatedAcceptance
from training.request import TrainRequest
from training.speed import Speed
from training.trainer import Position


@dataclass(frozen=True)
class Report:
    request: TrainRequest
    position: Position
    step: int
    """Steps after which the exported checkpoint was made."""
    whole: SimulatedAcceptance
    workloads: Mapping[str, SimulatedAcceptance]
    speed: Speed
    layout: str
    looping: int
    """Greedy texts of the target that were left out."""

    @property
    def measured(self) -> PairFigures:
        found = self.speed.tokens_per_s(self.whole.lengths)
        gains = {size: found[size] / found[0] for size in found if size}
        return PairFigures(self.whole.roots, self.whole.by_depth[0] if self.whole.by_depth else 0.0, gains)

    @property
    def ships(self) -> bool:
        return self.measured.ships

    @property
    def verdict(self) -> str:
        found = self.measured
        if found.ships:
            return f"Ship it: {found.reason}."
        remedy = "Train longer, on more texts, or on texts like those you serve."
        if not found.enough:
            remedy = "Give more held-out texts or held_out_answers; greedy texts that loop do not count."
        return f"Do not ship it: {found.reason}. {remedy}"


def write_report(report: Report, path: Path) -> None:
    """Write it as HTML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    """The HTML."""
    request, whole, speeds = report.request, report.whole, report.speed.tokens_per_s(report.whole.lengths)
    steps = [each["step"] for each in report.position.evaluations]
    losses = _smooth(report.position.losses)
    depths = range(len(whole.by_depth))
    curves: list[tuple[str, list[Line], str]] = [
        ("Loss, nats per position", [("loss", list(enumerate(losses, 1)))], "steps"),
        (
            "Tokens of a round on held-out texts",
            [(f"{request.tree_nodes} candidates", _pairs(steps, [e["length"] for e in report.position.evaluations]))],
            "steps",
        ),
        (
            "Accepted by depth on held-out texts",
            [
                (f"depth {depth + 1}", _pairs(steps, [e["by_depth"][depth] for e in report.position.evaluations]))
                for depth in depths
            ],
            "steps",
        ),
        (
            "Predicted tokens/s by candidates of a pass",
            [("with the drafter", sorted(speeds.items())), ("without", [(0, speeds[0]), (max(speeds), speeds[0])])],
            "candidates",
        ),
    ]
    slices = [["all texts", *_row(whole)], *([name, *_row(each)] for name, each in report.workloads.items())]
    costs = [
        ["0", f"{1e3 * report.speed.plain_s:.2f}", "-", "1.00", f"{speeds[0]:.0f}"],
        *(
            [str(size), f"{1e3 * report.speed.verify_s[size]:.2f}", f"{1e3 * report.speed.draft_s:.2f}",
             f"{whole.lengths[size]:.2f}", f"{speeds[size]:.0f}"]
            for size in report.speed.verify_s
        ),
    ]  # fmt: skip
    parts = [
        f"<h1>{escape(request.kind)} for {escape(request.target)}</h1>",
        f'<p class="{"yes" if report.ships else "no"}">{escape(report.verdict)}</p>',
        f"<p>Exported: the checkpoint of step {report.step} of {report.position.step}, as {escape(report.layout)}, "
        f"in {escape(request.out)}. PairFigures on {whole.roots} places of greedy texts of the target's own behind "
        f"held-out prompts; {report.looping} texts that looped were left out.</p>",
        *(f"<h2>{escape(title)}</h2>{chart(lines, unit)}" for title, lines, unit in curves),
        "<h2>Held-out texts by workload</h2>",
        table(["workload", "places", *(f"depth {depth + 1}" for depth in depths), "tokens a round"], slices),
        "<p>By depth: how often the first choice was right where the ones before it were. Tokens a round: a tree of 16 "
        "candidates that is the same in every round; trees that follow the drafter's confidence get more.</p>",
        "<h2>Prediction for one session on this machine</h2>",
        table(["candidates", "pass of the target, ms", "draft, ms", "tokens a round", "tokens/s"], costs),
        "<h2>Request</h2>",
        table(["setting", "value"], [[name, str(value)] for name, value in asdict(request).items()]),
    ]
    return page(f"{request.kind} for {request.target}", parts)


def _row(found: SimulatedAcceptance) -> list[str]:
    return [str(found.roots), *(f"{share:.3f}" for share in found.by_depth), f"{found.lengths[16]:.2f}"]


def _pairs(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(x, y, strict=True))


def _smooth(losses: Sequence[float]) -> list[float]:
    """A running mean, so that a curve can be seen in it."""
    found: list[float] = []
    for loss in losses:
        found.append(loss if not found else 0.95 * found[-1] + 0.05 * loss)
    return found
