"""The life of a role's process: interpreter tuning, when it ends, and the line with the reason.

The tuning replaces defaults of CPython and glibc that are costly for a process that computes in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)

END_WITH_PARENT = "SLIPSTREAM_END_WITH_PARENT"
"""Set to 1 for processes of `slipstream serve`: if it is killed, they end too."""
FAILED = "failed "
"""Begins the line on standard output with which such a process names the error that ends it."""
SWITCH_S = 0.0005
"""A model's thread, back from a pass, waits so long at most for an event loop that is busy; Python's own 5 ms would be
a quarter of a pass.
"""
COLLECT_AFTER = (50_000, 20, 10)
"""Objects more than freed ones, and collections of each age to one of the next. Trees make and drop thousands of
objects a pass; by default looking for rings among them took half of a drafter's time.
"""
COLLECT_OFTEN = (3_000, 20, 50)
"""Likewise, for a process whose event loop should stand for milliseconds at most: a refused call of gRPC leaves rings
of some 60 objects, and to free 50,000 took 0.1 s at a time.
"""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc's settings, read from the environment at a process's start. By default freed memory goes back to the kernel at
every step: that costs more than the mathematics of small models, and took 60 % of the time of training them.
"""

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
"""Parameters of glibc's `mallopt`."""
_RETURNED_BYTES, _ARENAS = 1 << 18, 2

PATIENT_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP's threads sleep between their calls. By default they spin, which takes the cores from the other roles on a
small machine: beside other work a token cost 140 ms of CPU instead of 15. To wake one takes so long that a pass of the
kernels does it once (`engine/kernels/stages.h`).
"""

DEADLY_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Those that end a process without a word, unless something handles them."""


def tune_runtime(collect_after: tuple[int, int, int] = COLLECT_AFTER) -> None:
    """For the whole process. What lives by now is never looked at again by the garbage collector."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*collect_after)


def return_memory() -> None:
    """For a process that computes little and is sent much: buffers of 256 KiB and more go back to the kernel when they
    are freed, whatever `ALLOCATOR` or an image say. Requests of a megabyte else leave holes between what stays, which
    count as memory for good. Nothing happens where the allocator is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _RETURNED_BYTES)
        mallopt(_TRIM_THRESHOLD, _RETURNED_BYTES)
        mallopt(_ARENA_MAX, _ARENAS)


async def until_signal(ready: str = "") -> None:
    """Wait for SIGTERM or SIGINT, or for the end of the parent process where this one ends with it. Both are handled
    before the line `ready` is printed: whoever reads it may end the process at once, and it drains."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str] = loop.create_future()

    def ask(name: str) -> None:
        if not asked.done():
            asked.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask, number.name)
    if ready:
        log.info("%s", ready)
        print(ready, flush=True)
    parent = os.getppid() if os.environ.get(END_WITH_PARENT) == "1" else None
    while not asked.done() and parent in (None, os.getppid()):
        await asyncio.wait([asked], timeout=1.0)
    log.info("the process ends: %s", asked.result() if asked.done() else "its parent process is gone")


def run_role(
    role: str, serving: Coroutine[Any, Any, None], loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    """Run a role until it ends; a typed error exits as in `exit_on_error`. `loop`: makes its event loop; None: one of
    asyncio's."""
    with exit_on_error(role), asyncio.Runner(loop_factory=loop) as runner:
        runner.run(serving)


@contextlib.contextmanager
def exit_on_error(role: str) -> Iterator[None]:
    """Whatever ends the process, a line on standard error says what, if anything can be said: a typed error in one
    sentence with status 1, any other with its traceback."""
    faulthandler.enable(2)  # reports crashes of the interpreter
    try:
        with _telling_signals(role):
            yield
    except SystemExit as error:
        if not isinstance(error.code, str):
            print(f"{role}: something ended the process with status {error.code or 0}", file=sys.stderr)
        raise
    except (SlipstreamError, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, SlipstreamError):
            raise
        if os.environ.get(END_WITH_PARENT) == "1":
            print(f"{FAILED}{first.message}", flush=True)
        sys.exit(f"{role}: {first.message}")


@contextlib.contextmanager
def _telling_signals(role: str) -> Iterator[None]:
    """Signals that nothing else handles still end the process, but not without a word."""

    def die(number: int, _: object) -> None:
        print(f"{role}: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in DEADLY_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, die)
    try:
        yield
    finally:
        for number in DEADLY_SIGNALS:
            if signal.getsignal(number) is die:
                signal.signal(number, signal.SIG_DFL)
