"""What else used the machine while a sample was taken: time stolen on its host, and CPU of other people's processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from measurement.load.machine import machine_ticks

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
MOST_STEAL, MOST_OTHERS = 2.0, 5.0
"""Percent of the cores' time beyond which a sample counts as disturbed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Percent of all cores' time."""

    steal: float
    others: float
    """Of processes that this one did not start."""
    own_s: float = field(default=0.0, compare=False)
    """CPU seconds of the other ones, threads that wait in a loop included."""

    @property
    def disturbed(self) -> bool:
        return self.steal > MOST_STEAL or self.others > MOST_OTHERS


class Watch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._ticks, self._own = machine_ticks(), own_ticks()

    def seen(self) -> Seen:
        """Since the watch began. Processes that end meanwhile count as others."""
        steal, idle, everything = (now - then for now, then in zip(machine_ticks(), self._ticks, strict=True))
        own = own_ticks() - self._own
        others = everything - steal - idle - own
        percent = 100.0 / max(1, everything)
        return Seen(steal * percent, max(0.0, others * percent), own / TICKS_A_SECOND)


def own_ticks() -> int:
    """Ticks of this process and all that it started, directly or not, and that live."""
    parents, used = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_own(process: int) -> bool:
        while process and process != os.getpid():
            process = parents.get(process, 0)
        return bool(process)

    return sum(ticks for process, ticks in used.items() if is_own(process))
