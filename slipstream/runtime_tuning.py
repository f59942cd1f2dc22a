"""What the defaults of CPython and of glibc cost a process that computes in milliseconds."""

from __future__ import annotations

import gc
import sys

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


def tune() -> None:
    """For the whole process. What lives by now is never looked at again by the garbage collector."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
