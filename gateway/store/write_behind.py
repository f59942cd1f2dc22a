"""Writes of relaxed sessions, which go on without waiting for them: one task carries them out for all sessions, each in
its own order, so that a store that is away delays no session and loses only what was not written when the gateway dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from slipstream.concurrency import Broadcast
from slipstream.errors import Unavailable

RETRY_S = 0.2
"""Seconds between two tries of a write while the store is away; each try has its own retries and timeouts."""


class LaggingLog(Protocol):
    """A session's log whose writes wait here."""

    @property
    def id(self) -> str: ...

    @property
    def enqueued(self) -> int:
        """Writes that were left to the queue so far."""

    @property
    def completed(self) -> int:
        """Those that are written, or never will be."""

    async def catch_up(self) -> bool:
        """Carry out what is enqueued so far; whether the store took it."""


class WriteBehindQueue:
    """Carries out the writes of relaxed sessions while the sessions go on: one task for all of them, each session in
    its own order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: dict[LaggingLog, float] = {}
        """Logs that are behind, and the monotonic seconds since when."""
        self._filled = asyncio.Event()
        self._progress = Broadcast()

    def add_log(self, log: LaggingLog) -> None:
        """The log has enqueued a write."""
        self._pending.setdefault(log, self._clock())
        self._filled.set()

    @property
    def lag_s(self) -> float:
        """Age of the oldest write that waits here."""
        return self._clock() - min(self._pending.values(), default=self._clock())

    async def written(self, grace_s: float, session: str | None = None) -> None:
        """Wait until all that is enqueued so far is written, for one session or for all. Raises Unavailable when it
        takes longer than `grace_s`."""
        due = {log: log.enqueued for log in self._pending if session in (None, log.id)}
        try:
            async with asyncio.timeout(grace_s):
                while any(log.completed < enqueued for log, enqueued in due.items()):
                    await self._progress.wait()
        except TimeoutError as error:
            raise store_away() from error

    async def run(self) -> None:
        """Carry out writes until cancelled."""
        while True:
            while not self._pending:
                self._filled.clear()
                await self._filled.wait()
            async with asyncio.TaskGroup() as tasks:
                taken = [tasks.create_task(self._catch_up(log)) for log in self._pending]
            if not all(task.result() for task in taken):
                await asyncio.sleep(RETRY_S)

    async def _catch_up(self, log: LaggingLog) -> bool:
        """Whether the store took the log's writes."""
        taken = await log.catch_up()
        if log.completed == log.enqueued:
            del self._pending[log]
        elif taken:  # what is left came meanwhile
            self._pending[log] = self._clock()
        self._progress.notify_all()
        return taken


def store_away() -> Unavailable:
    """The error of whoever waited too long."""
    return Unavailable("The session store is away; what was streamed stays valid, retry.", reason="STORE_UNAVAILABLE")
