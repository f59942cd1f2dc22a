"""The life of a role's process: interpreter tuning, when it ends, and its exit message.

The tuning replaces defaults of CPython and glibc that are costly for a process that computes in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

from slipstream.errors import SlipstreamError

END_WITH_PARENT = "SLIPSTREAM_END_WITH_PARENT"
"""Set to 1 for processes of `slipstream serve`: if it is killed, they end too."""
SWITCH_S = 0.0005
"""A model's thread, back from a pass, waits so long at most for an event loop that is busy; Python's own 5 ms would be
a quarter of a pass.
"""
COLLECT_AFTER = (50_000, 20, 10)
"""Objects more than freed ones, and collections of each age to one of the next. Trees make and drop thousands of
objects a pass; by default looking for rings among them took half of a drafter's time.
"""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc's settings, read from the environment at a process's start. By default freed memory goes back to the kernel at
every step: that costs more than the mathematics of small models, and took 60 % of the time of training them.
"""

PATIENT_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP's threads sleep while they wait for each other. By default they spin, which takes the cores from the other
roles on a small machine: beside other work a token cost 140 ms of CPU instead of 15.
"""


def tune_runtime() -> None:
    """For the whole process. What lives by now is never looked at again by the garbage collector."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


async def until_signal() -> None:
    """Wait for SIGTERM or SIGINT, or for the end of the parent process where this one ends with it."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    parent = os.getppid() if os.environ.get(END_WITH_PARENT) == "1" else None
    while not asked.is_set() and parent in (None, os.getppid()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), 1.0)


def run_role(role: str, serving: Coroutine[Any, Any, None]) -> None:
    """Run a role until it ends; a typed error exits as in `exit_on_error`."""
    with exit_on_error(role):
        asyncio.run(serving)


@contextlib.contextmanager
def exit_on_error(role: str) -> Iterator[None]:
    """A typed error prints one sentence and exits with status 1, without a traceback."""
    try:
        yield
    except (SlipstreamError, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, SlipstreamError):
            raise
        sys.exit(f"{role}: {first.message}")
