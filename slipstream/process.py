"""The life of a role's process: until when it runs, and what it says if it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

from slipstream.errors import SlipstreamError

END_WITH_PARENT = "SLIPSTREAM_END_WITH_PARENT"
"""Set to 1 for processes of `slipstream serve`: killed without a word, it leaves none behind."""


async def until_signal(with_parent: bool = False) -> None:
    """Return when the process is asked to end (SIGTERM or SIGINT), or lost the parent it was to end with."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    parent = os.getppid() if with_parent or os.environ.get(END_WITH_PARENT) == "1" else None
    while not asked.is_set() and parent in (None, os.getppid()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), 1.0)


def run(role: str, serving: Coroutine[Any, Any, None]) -> None:
    """Run a role to its end, `explained`."""
    with explained(role):
        asyncio.run(serving)


@contextlib.contextmanager
def explained(role: str) -> Iterator[None]:
    """A typed error that stops a role is one sentence and exit status 1, not a traceback."""
    try:
        yield
    except (SlipstreamError, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, SlipstreamError):
            raise
        sys.exit(f"{role}: {first.message}")
