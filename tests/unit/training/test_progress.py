"""Whoever waits for training sees how far it is, on standard error alone."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from training.progress import StageProgress, TrainingProgress


def test_without_a_terminal_progress_is_a_line_now_and_then_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    clock = iter([100.0, 101.0, 131.0, 132.0])
    monkeypatch.setattr("training.progress.time.monotonic", lambda: next(clock))
    with TrainingProgress("draft", Console(file=shown, width=40)) as progress:
        for step in range(1, 5):
            progress.update(step / 4, step, loss=2.0, seconds=60.0 * step, tokens=6000 * step)
    assert shown.getvalue().splitlines() == [
        "draft   25.0%  step 1  loss 2.000  100 tokens/s  3.0 min left",
        "draft   75.0%  step 3  loss 2.000  100 tokens/s  1.0 min left",
        "draft  100.0%  step 4  loss 2.000  100 tokens/s  0.0 min left",
    ]


def test_on_a_terminal_there_is_a_bar() -> None:
    shown = io.StringIO()
    with StageProgress("answers of the target", Console(file=shown, force_terminal=True, width=100)) as progress:
        progress.show(0.5, "20 of 40")
    assert "answers of the target" in shown.getvalue() and "50%" in shown.getvalue() and "20 of 40" in shown.getvalue()


def test_the_bar_of_a_long_run_fits_80_columns_and_its_findings_stand_above() -> None:
    shown = io.StringIO()
    with TrainingProgress("medusa", Console(file=shown, force_terminal=True, width=80)) as progress:
        progress.finding = "2.31 tokens a round, accepted by depth 0.61 0.55 0.50 0.47"
        progress.update(0.5, 12_345, loss=12.345, seconds=36_000.0, tokens=900_000_000)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in plain.splitlines()]
    assert max(len(line) for line in lines) <= 80
    assert any(line.endswith("step 12345  loss 12.345  25,000 tokens/s  600.0 min left") for line in lines)
    assert "step 12345: 2.31 tokens a round, accepted by depth 0.61 0.55 0.50 0.47" in lines


def test_progress_is_printed_on_standard_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress("answers of the target") as progress:
        progress.show(1.0, "40 of 40")
    printed = capsys.readouterr()
    assert printed.out == "" and "answers of the target  100.0%  40 of 40" in printed.err
