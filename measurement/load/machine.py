"""Disturbance of this machine during a measurement: CPU time stolen by others on its host, and its load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """None where the system reports none."""

    steal_percent: float | None
    """Share of all cores' time that a hypervisor gave to others."""
    idle_percent: float | None
    load: float
    """Average of the last minute of processes that ran or wanted to, the measured ones included."""


class Watch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._began = _ticks()

    def seen(self) -> Disturbance:
        """Since the watch began."""
        load = os.getloadavg()[0]
        now = _ticks()
        if now is None or self._began is None:
            return Disturbance(None, None, load)
        stolen, idle, all_ticks = (after - before for before, after in zip(self._began, now, strict=True))
        share = 100.0 / max(1, all_ticks)
        return Disturbance(stolen * share, idle * share, load)


def machine_ticks() -> tuple[int, int, int]:
    """Ticks since the machine started: stolen, idle, and all. Raises OSError, ValueError or IndexError on systems
    without Linux's /proc."""
    ticks = [int(word) for word in TICKS.read_text().splitlines()[0].split()[1:9]]
    return ticks[7], ticks[3] + ticks[4], sum(ticks)


def _ticks() -> tuple[int, int, int] | None:
    try:
        return machine_ticks()
    except (OSError, ValueError, IndexError):
        return None
