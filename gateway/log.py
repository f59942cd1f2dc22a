"""One session's writes to the store: in order, fenced by its epoch, and as durable as configured."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from gateway.store import SessionStore
from gateway.store.record import Record
from slipstream.errors import SlipstreamError, Unavailable

Write = Callable[[], Awaitable[None]]

RETRY_S = 0.2
"""Between two tries on a store that is away; each try has its own retries and timeouts."""


class SessionLog:
    """`strict` waits for every write, and at most `grace_s` for a store that is away; `relaxed` leaves writes behind
    for the scribe. The first write, `create`, is waited for in both: without a record there is no session."""

    def __init__(self, store: SessionStore, record: Record, *, scribe: Scribe | None, grace_s: float) -> None:
        self._store = store
        self._record = replace(record, tokens=())  # only its head is needed later
        self._prompt = record.tokens
        self._scribe = scribe
        self._grace_s = grace_s
        self._behind: deque[Write] = deque()
        self._broken: SlipstreamError | None = None
        self._given_up = False
        """Whether the store was away for too long: then nobody waits for it again."""
        self.epoch = record.epoch
        self.length = len(record.tokens)

    async def create(self) -> None:
        await self._store.create(replace(self._record, tokens=self._prompt))

    async def append(self, tokens: Sequence[int]) -> None:
        """Raises Aborted when another owner has the session, Unavailable when the store is away for too long."""
        epoch, start = self.epoch, self.length
        self.length += len(tokens)
        await self._do(lambda: self._store.append(self._record.id, epoch, start, tokens))

    async def raise_epoch(self) -> None:
        """Fence off everything that was said under the present epoch."""
        self.epoch += 1
        await self.append(())

    async def truncate(self, length: int) -> None:
        """Cut back to `length` tokens under the next epoch."""
        self.epoch += 1
        self.length = length
        epoch = self.epoch
        await self._do(lambda: self._store.truncate(self._record.id, epoch, length))

    async def finish(self, outcome: bytes) -> None:
        epoch = self.epoch
        await self._do(lambda: self._store.finish(self._record.id, epoch, outcome))

    async def catch_up(self) -> bool:
        """Write what was left behind; whether all of it is written. Not for two callers at once."""
        while self._behind:
            try:
                await self._behind[0]()
            except Unavailable:
                return False
            except SlipstreamError as error:  # fenced: nothing of this session may be written any more
                self._broken = error
                self._behind.clear()
                return True
            self._behind.popleft()
        return True

    async def _do(self, write: Write) -> None:
        if self._broken is not None:
            raise self._broken
        if self._scribe is not None:
            self._behind.append(write)
            self._scribe.mark(self)
            return
        if self._given_up:
            await write()
            return
        try:
            async with asyncio.timeout(self._grace_s):
                while not await _done(write):
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as error:
            self._given_up = True
            raise Unavailable(
                "The session store is away; what was streamed stays valid, retry.", reason="STORE_UNAVAILABLE"
            ) from error


class Scribe:
    """Writes what relaxed sessions left behind: one task for all of them, each session in its own order."""

    def __init__(self) -> None:
        self._marked: dict[SessionLog, None] = {}
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def mark(self, log: SessionLog) -> None:
        self._marked[log] = None
        self._idle.clear()
        self._filled.set()

    async def idle(self) -> None:
        """Wait until nothing is left behind."""
        await self._idle.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self._marked:
                self._idle.set()
                self._filled.clear()
                await self._filled.wait()
            logs, self._marked = list(self._marked), {}
            async with asyncio.TaskGroup() as tasks:
                written = [tasks.create_task(log.catch_up()) for log in logs]
            if late := [log for log, task in zip(logs, written, strict=True) if not task.result()]:
                self._marked |= dict.fromkeys(late)
                await asyncio.sleep(RETRY_S)


async def _done(write: Write) -> bool:
    try:
        await write()
    except Unavailable:
        return False
    return True
