"""What callbacks of event loops compute, in CPU seconds of their thread: other processes' load changes nothing.

asyncio's own log of slow callbacks counts wall time, which on a busy machine says nothing.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

from gateway.auth.loop_turns import FairLoop, WaitingCallback

TESTS = str(Path(__file__).parents[1])

Seen = Callable[[float, Any], None]
"""Takes the CPU seconds of a callback, and the callback."""


@contextmanager
def watching(least_s: float, seen: Seen) -> Iterator[None]:
    """Every callback of any loop of this process that computes for `least_s` or longer is reported to `seen`."""
    run, take = events.Handle._run, WaitingCallback.take

    def timed(handle: events.Handle) -> None:
        began = thread_time()
        run(handle)
        if (took := thread_time() - began) >= least_s and not are_turns(handle):
            seen(took, handle)

    def timed_turn(handle: WaitingCallback, loop: FairLoop) -> None:
        began = thread_time()
        take(handle, loop)
        if (took := thread_time() - began) >= least_s:
            seen(took, handle)

    events.Handle._run, WaitingCallback.take = timed, timed_turn  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        events.Handle._run, WaitingCallback.take = run, take  # type: ignore[method-assign]


def are_turns(handle: Any) -> bool:
    """Whether these are the turns of callbacks that are reported themselves."""
    return getattr(getattr(handle, "_callback", None), "__func__", None) is FairLoop._take_turns


def code_of(handle: Any) -> str:
    """The file and name of what a callback ran: of a task its outermost coroutine."""
    callback = getattr(handle, "_callback", None)
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine = owner.get_coro()
        code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
        return repr(coroutine) if code is None else f"{code.co_filename}: {code.co_qualname}"
    return repr(callback)
