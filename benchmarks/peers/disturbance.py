"""What else used the machine while a sample was taken: time stolen on its host, and CPU of other people's processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slipstream.client.load.machine import machine_ticks

MOST_STEAL, MOST_OTHERS = 2.0, 5.0
"""Percent of the cores' time beyond which a sample counts as disturbed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Percent of all cores' time."""

    steal: float
    others: float
    """Of processes that this one did not start."""

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
        others = everything - steal - idle - (own_ticks() - self._own)
        return Seen(100.0 * steal / max(1, everything), max(0.0, 100.0 * others / max(1, everything)))


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
