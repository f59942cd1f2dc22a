"""Shows which role of `slipstream serve` is loading what, and since when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0
"""Seconds after which a role that still loads is named again, where the output is not a terminal."""


class Loading:
    """A line with a clock for each role on a terminal; elsewhere a line for each that takes long."""

    def __init__(self, console: Console | None = None, line_every_s: float = LINE_EVERY_S) -> None:
        self._console = console or Console(stderr=True)
        self._line_every_s = line_every_s
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._clocks = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)

    async def watch(self, said: str, starting: Awaitable[str]) -> str:
        """The address that the role serves at, which does what is `said`. Raises what `starting` raises."""
        clock, began = self._clocks.add_task(said, total=None), time.monotonic()
        task = asyncio.ensure_future(starting)
        try:
            while not (await asyncio.wait([task], timeout=self._line_every_s))[0]:
                if not self._console.is_terminal:
                    passed_s = time.monotonic() - began
                    self._console.print(
                        f"slipstream serve: {said}, for {passed_s:.0f} s now", markup=False, soft_wrap=True
                    )
            return task.result()
        finally:
            task.cancel()
            self._clocks.remove_task(clock)

    def __enter__(self) -> Self:
        self._clocks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._clocks.stop()
