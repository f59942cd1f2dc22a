"""The cores a process may use: its affinity, bounded by the CPU quota of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.errors import InvalidArgument

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def threads_for(requested: int) -> int:
    """The number of torch threads; 0 requests one per core. Raises InvalidArgument for more threads than cores: threads
    that share a core wait for each other at every operator."""
    cores = available_cores()
    if not 0 <= requested <= cores:
        raise InvalidArgument(
            f"threads={requested}, but this process may use {cores} cores; give at most that, or 0 for all."
        )
    return requested or cores


def available_cores() -> int:
    """Whole cores, one at least. Never those of the machine, which others use too."""
    quota = cpu_quota()
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Cores' worth of time that the narrowest control group above this process grants; None: no bound.

    Version 2 has it in `cpu.max`, as "QUOTA PERIOD" or "max PERIOD"; version 1 in two files of the `cpu` hierarchy.
    """
    found = [quota for folder in _groups(root, membership) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    """Folders of the process's control groups and of all above them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        # Inside a container the path may be the host's; the container's own group is then mounted at the top.
        own = top / path.lstrip("/")
        folders += [top, *(folder for folder in (own, *own.parents) if folder.is_relative_to(top))]
    return list(dict.fromkeys(folders))


def _quota(folder: Path) -> float | None:
    try:
        if (modern := folder / "cpu.max").exists():
            quota, period = modern.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None
