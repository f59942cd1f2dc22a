"""Cores of a process, from affinity and control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.engine import cpu_cores
from slipstream.engine.cpu_cores import available_cores, cpu_quota, threads_for
from slipstream.errors import InvalidArgument


def groups(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A tree of control groups, and the file that says which one the process is in."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    (root / "membership").write_text(membership + "\n")
    return root, root / "membership"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/pod/box", {"pod/box/cpu.max": "400000 100000"}, 4.0),
        ("0::/pod/box", {"pod/box/cpu.max": "400000 100000", "pod/cpu.max": "200000 100000"}, 2.0),
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "300000 100000"}, 3.0),
        ("0::/of/the/host", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"other/cpu.max": "100000 100000"}, None),
        (
            "4:cpu,cpuacct:/box",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "250000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("9:memory:/box", {"memory/box/cpu.max": "100000 100000"}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
    ],
)
def test_the_narrowest_group_bounds(
    membership: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert cpu_quota(*groups(tmp_path, membership, files)) == expected


def test_without_control_groups_there_is_no_bound(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(("quota", "affinity", "expected"), [(None, 4, 4), (2.9, 4, 2), (8.0, 4, 4), (0.3, 4, 1)])
def test_affinity_and_quota_both_count(
    quota: float | None, affinity: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert available_cores() == threads_for(0) == threads_for(expected) == expected
    assert threads_for(1) == 1
    for wrong in (expected + 1, -1):
        with pytest.raises(InvalidArgument, match="give at most"):
            threads_for(wrong)
