"""Writes that sessions left behind, carried out one after the other while the sessions go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.concurrency import Broadcast
from slipstream.errors import Unavailable

if TYPE_CHECKING:
    from gateway.store.session_log import SessionLog

RETRY_S = 0.2
"""Between two tries on a store that is away; each try has its own retries and timeouts."""


class WriteBehindQueue:
    """Writes what relaxed sessions left behind: one task for all of them, each session in its own order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marked: dict[SessionLog, float] = {}
        """Since when they have been waiting."""
        self._filled = asyncio.Event()
        self._progress = Broadcast()

    def mark(self, log: SessionLog) -> None:
        self._marked.setdefault(log, self._clock())
        self._filled.set()

    @property
    def lag_s(self) -> float:
        """Age of the oldest write that is left behind."""
        return self._clock() - min(self._marked.values(), default=self._clock())

    async def written(self, grace_s: float, session: str | None = None) -> None:
        """Wait until all that was left behind so far is written, of one session or of all. Raises Unavailable when it
        takes longer."""
        due = {log: log.asked for log in self._marked if session in (None, log.id)}
        try:
            async with asyncio.timeout(grace_s):
                while any(log.done < asked for log, asked in due.items()):
                    await self._progress.wait()
        except TimeoutError as error:
            raise away() from error

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while not self._marked:
                self._filled.clear()
                await self._filled.wait()
            async with asyncio.TaskGroup() as tasks:
                taken = [tasks.create_task(self._write(log)) for log in self._marked]
            if not all(task.result() for task in taken):
                await asyncio.sleep(RETRY_S)

    async def _write(self, log: SessionLog) -> bool:
        """Whether the store took it."""
        taken = await log.catch_up()
        if log.done == log.asked:
            del self._marked[log]
        elif taken:  # what is left came meanwhile
            self._marked[log] = self._clock()
        self._progress.notify_all()
        return taken


def away() -> Unavailable:
    return Unavailable("The session store is away; what was streamed stays valid, retry.", reason="STORE_UNAVAILABLE")
