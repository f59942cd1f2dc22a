"""What the benchmarks know of processes: their CPU time, and a fleet that serves while a block runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.cli.serve import Fleet, default_threads

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
INFLATED = ROOT / ".cache" / "target-300m"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Seconds of CPU a process has used, in the kernel and outside it, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


@asynccontextmanager
async def serving(
    target: str, draft: str, dtype: str = "auto", kinds: Sequence[str] = ("model",)
) -> AsyncIterator[str]:
    """The gateway's address while verifier, drafter and gateway run as processes of their own."""
    fleet = Fleet(target, draft, kinds, dtype, default_threads())
    try:
        yield await fleet.start("127.0.0.1:0", "memory")
    finally:
        await fleet.stop()
