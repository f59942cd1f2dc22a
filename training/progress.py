"""Shows how far training is, on standard error: a bar on a terminal, elsewhere a line now and then. What is printed
on standard output is the result."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

LINE_EVERY_S = 30.0
BAR = 8
"""Columns of the bar: the figures need most of 80."""


class StageProgress:
    """Progress of one stage: its share done, and a status."""

    def __init__(self, name: str, console: Console | None = None, status: str = "") -> None:
        self._name = name
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(BAR),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=1.0, status=status)
        self._last_line = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, done: float, status: str) -> None:
        """`done`: share of the stage, 0..1."""
        self._bar.update(self._task, completed=done, status=status)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last_line > LINE_EVERY_S or done >= 1.0):
            self._last_line = now
            self._console.print(f"{self._name}  {done:6.1%}  {status}", soft_wrap=True, highlight=False)


class TrainingProgress(StageProgress):
    """Loss (smoothed, nats per token), speed and remaining time of a stage of steps, and what was found last."""

    finding = ""
    _shown = ""

    def __init__(self, name: str, console: Console | None = None) -> None:
        super().__init__(name, console, "first step")
        self._smooth: float | None = None

    def update(self, used: float, step: int, loss: float, seconds: float, tokens: int) -> None:
        """`used` of the budget 0..1, the step's `loss`, training `seconds` and `tokens` so far."""
        self._smooth = loss if self._smooth is None else 0.95 * self._smooth + 0.05 * loss
        speed = tokens / seconds if seconds else 0.0
        left = seconds * (1.0 - used) / max(used, 1e-9)
        status = f"step {step}  loss {self._smooth:.3f}  {speed:,.0f} tokens/s  {left / 60:.1f} min left"
        if not self._console.is_terminal:
            status += f"  {self.finding}" if self.finding else ""
        elif self.finding != self._shown:  # a line of its own above the bar, which has no room for it
            self._shown = self.finding
            self._console.print(f"step {step}: {self.finding}", highlight=False)
        self.show(used, status)
