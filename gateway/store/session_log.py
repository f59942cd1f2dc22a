"""The session log: one session's writes to the store, in order and fenced by its epoch. `strict` waits for every write,
up to `grace_s` for a store that does not answer, so a token is stored before a client receives it; `relaxed` leaves
writes to one queue for all sessions. The log keeps a copy of what it wrote, and restores it before the next write where
a failover or restart of the store lost it.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.store.session_store import SessionRecord, SessionStore
from gateway.store.write_behind import RETRY_S, WriteBehindQueue, store_away
from slipstream.errors import NotFound, OutOfRange, SlipstreamError, Unavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    execute: Callable[[], Awaitable[None]]
    remember: Callable[[], None] = lambda: None
    """Called once it is written."""


class SessionLog:
    """Writes for one session. Strict without a `write_behind` queue: a write waits at most `grace_s` for a store that
    is away. Relaxed with one: only `create` is waited for, because without a record there is no session."""

    def __init__(
        self, store: SessionStore, record: SessionRecord, *, write_behind: WriteBehindQueue | None, grace_s: float
    ) -> None:
        """`record`: of a new session, or as it was taken over."""
        self._store = store
        self._written = replace(record, tokens=())
        self._tokens = array("I", record.tokens)
        """The tokens of `_written`."""
        self._write_behind = write_behind
        self._grace_s = grace_s
        self._behind: deque[_Write] = deque()
        self.enqueued = 0
        """Writes that were left to the queue so far."""
        self._one_at_a_time = asyncio.Lock()
        self._fenced: SlipstreamError | None = None
        self.gave_up = False
        """Whether the store was away for longer than `grace_s`: further writes do not wait for it again."""
        self.epoch = record.epoch
        self.length = len(record.tokens)

    @property
    def id(self) -> str:
        return self._written.id

    @property
    def params(self) -> bytes:
        """The request as it was written last."""
        return self._written.params

    @property
    def epoch_written(self) -> int:
        """The epoch that the store has, as far as this log has seen."""
        return self._written.epoch

    @property
    def completed(self) -> int:
        """The number of enqueued writes that are written, or never will be because another owner has the session."""
        return self.enqueued - len(self._behind)

    async def create(self) -> None:
        await self._store.create(self._record())

    async def append(self, tokens: Sequence[int]) -> None:
        """Raises Aborted when another owner has the session, Unavailable when the store is away for too long."""
        epoch, start = self.epoch, self.length
        self.length += len(tokens)
        execute = partial(self._store.append, self._written.id, epoch, start, tokens)
        await self._write(_Write(execute, partial(self._remember, epoch, start, tokens)))

    async def raise_epoch(self, params: bytes | None = None) -> None:
        """Fence off everything that was sent under the present epoch, with other `params` from now on where they are
        given. Raises what `append` raises."""
        await self.truncate(self.length, params)

    async def truncate(self, length: int, params: bytes | None = None, tokens: Sequence[int] = ()) -> None:
        """Cut back to `length` tokens under the next epoch, with other `params` from now on where they are given, and
        `tokens` behind. Raises what `append` raises."""
        self.epoch += 1
        self.length = length + len(tokens)
        epoch = self.epoch
        execute = partial(self._store.truncate, self._written.id, epoch, length, params, tokens)
        await self._write(_Write(execute, partial(self._remember, epoch, length, tokens, params)))

    async def settle(self) -> None:
        """Wait until everything so far is written, relaxed or not. Raises Unavailable when the store is away for too
        long."""
        if self._write_behind is not None:
            await self._write_behind.written(self._grace_s, self.id)

    async def finish(self, outcome: bytes) -> None:
        await self._write(_Write(lambda: self._store.finish(*self._last(), outcome, len(self._tokens))))

    async def release(self) -> None:
        """Suspend the session: whichever gateway its client comes back to may take it over at once."""
        await self._write(_Write(lambda: self._store.release(*self._last(), len(self._tokens))))

    async def renew(self) -> None:
        """Keep the lease without writing. Raises Aborted when another owner has the session, Unavailable when the store
        is away."""
        async with self._one_at_a_time:
            if self._behind or self.gave_up:  # a write is tried again and again: that renews it too
                return
            await self._execute(_Write(partial(self._store.renew, *self._last(), len(self._tokens))))

    async def catch_up(self) -> bool:
        """Carry out what is enqueued so far; whether the store took it. One caller at a time."""
        async with self._one_at_a_time:
            for _ in range(len(self._behind)):
                try:
                    await self._execute(self._behind[0])
                except Unavailable:
                    return False
                except SlipstreamError as error:  # nothing of this session may be written any more
                    self._fenced = error
                    self._behind.clear()
                    return True
                self._behind.popleft()
            return True

    async def _write(self, write: _Write) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._write_behind is not None:
            self._behind.append(write)
            self.enqueued += 1
            self._write_behind.add_log(self)
            return
        if self.gave_up:
            async with self._one_at_a_time:
                await self._execute(write)
        else:
            await self._retry(write)

    async def _retry(self, write: _Write) -> None:
        try:
            # A renewal of the lease that the store does not answer counts too: the write waits for its end.
            async with asyncio.timeout(self._grace_s), self._one_at_a_time:
                while not await self._executed(write):
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as error:
            self.gave_up = True
            raise store_away() from error

    async def _executed(self, write: _Write) -> bool:
        try:
            await self._execute(write)
        except Unavailable:
            return False
        return True

    async def _execute(self, write: _Write) -> None:
        """A record that is gone, or not as it was left, is put back first: a failover lost the last writes, a restart
        all of them."""
        try:
            await write.execute()
        except (NotFound, OutOfRange) as error:
            log.warning("%s It is put back as it was.", error.message)
            await self._store.restore(self._record())
            await self._execute_again(write)
        write.remember()

    async def _execute_again(self, write: _Write) -> None:
        try:
            await write.execute()
        except (NotFound, OutOfRange) as error:  # lost again already: the next try puts it back again
            raise Unavailable(
                "The session store goes on losing what is written; retry.", reason="STORE_UNAVAILABLE"
            ) from error

    def _remember(self, epoch: int, start: int, tokens: Sequence[int] = (), params: bytes | None = None) -> None:
        del self._tokens[start:]
        self._tokens.extend(tokens)
        params = self._written.params if params is None else params
        if (epoch, params) != (self._written.epoch, self._written.params):
            self._written = replace(self._written, epoch=epoch, params=params)

    def _last(self) -> tuple[str, int]:
        """The session's id and the epoch that was written last. A higher one, whose write was interrupted, may belong
        to another owner by now, and restoring under it would overrule that owner."""
        return self._written.id, self._written.epoch

    def _record(self) -> SessionRecord:
        return replace(self._written, tokens=tuple(self._tokens))
