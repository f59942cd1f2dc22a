"""One session's writes to the store: in order, fenced by its epoch, and as durable as configured."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.store import SessionStore
from gateway.store.record import SessionRecord
from gateway.store.write_behind import RETRY_S, WriteBehindQueue, away
from slipstream.errors import NotFound, OutOfRange, SlipstreamError, Unavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    carry_out: Callable[[], Awaitable[None]]
    note: Callable[[], None] = lambda: None
    """Remembers it as written."""


class SessionLog:
    """`strict` waits for every write, and at most `grace_s` for a store that is away; `relaxed` leaves writes behind
    for the scribe. The first write, `create`, is waited for in both: without a record there is no session.

    Remembers all that was written: where the store lost some of it, it is put back before the next write.
    """

    def __init__(
        self, store: SessionStore, record: SessionRecord, *, scribe: WriteBehindQueue | None, grace_s: float
    ) -> None:
        """`record`: of a new session, or as it was taken over."""
        self._store = store
        self._written = replace(record, tokens=())
        self._tokens = array("I", record.tokens)
        """Of `_written`."""
        self._scribe = scribe
        self._grace_s = grace_s
        self._behind: deque[_Write] = deque()
        self.asked = 0
        """Writes that were left behind, ever."""
        self._one_at_a_time = asyncio.Lock()
        self._broken: SlipstreamError | None = None
        self._given_up = False
        """Whether the store was away for too long: then nobody waits for it again."""
        self.epoch = record.epoch
        self.length = len(record.tokens)

    @property
    def id(self) -> str:
        return self._written.id

    @property
    def epoch_written(self) -> int:
        """The epoch that the store has, as far as anybody here knows."""
        return self._written.epoch

    @property
    def done(self) -> int:
        """Of `asked`: those that are written, or never will be, for another owner has the session."""
        return self.asked - len(self._behind)

    async def create(self) -> None:
        await self._store.create(self._record())

    async def append(self, tokens: Sequence[int]) -> None:
        """Raises Aborted when another owner has the session, Unavailable when the store is away for too long."""
        epoch, start = self.epoch, self.length
        self.length += len(tokens)
        carry_out = partial(self._store.append, self._written.id, epoch, start, tokens)
        await self._do(_Write(carry_out, partial(self._note, epoch, start, tokens)))

    async def raise_epoch(self) -> None:
        """Fence off everything that was said under the present epoch."""
        self.epoch += 1
        epoch, start = self.epoch, self.length
        carry_out = partial(self._store.append, self._written.id, epoch, start, ())
        await self._do(_Write(carry_out, partial(self._note, epoch, start)))

    async def truncate(self, length: int, params: bytes | None = None, tokens: Sequence[int] = ()) -> None:
        """Cut back to `length` tokens under the next epoch, with other `params` from now on where they are given, and
        `tokens` behind."""
        self.epoch += 1
        self.length = length + len(tokens)
        epoch = self.epoch
        carry_out = partial(self._store.truncate, self._written.id, epoch, length, params, tokens)
        await self._do(_Write(carry_out, partial(self._note, epoch, length, tokens, params)))

    async def finish(self, outcome: bytes) -> None:
        await self._do(_Write(lambda: self._store.finish(*self._last(), outcome, len(self._tokens))))

    async def release(self) -> None:
        """Suspended: whoever the client comes back to may take the session over at once."""
        await self._do(_Write(lambda: self._store.release(*self._last(), len(self._tokens))))

    async def renew(self) -> None:
        """Keep the lease without writing. Raises Aborted when another owner has the session, Unavailable when the store
        is away."""
        async with self._one_at_a_time:
            if self._behind or self._given_up:  # a write is tried again and again: that renews it too
                return
            await self._carry_out(_Write(partial(self._store.renew, *self._last(), len(self._tokens))))

    async def catch_up(self) -> bool:
        """Write what was left behind until now; whether the store took it. Not for two callers at once."""
        async with self._one_at_a_time:
            for _ in range(len(self._behind)):
                try:
                    await self._carry_out(self._behind[0])
                except Unavailable:
                    return False
                except SlipstreamError as error:  # fenced: nothing of this session may be written any more
                    self._broken = error
                    self._behind.clear()
                    return True
                self._behind.popleft()
            return True

    async def _do(self, write: _Write) -> None:
        if self._broken is not None:
            raise self._broken
        if self._scribe is not None:
            self._behind.append(write)
            self.asked += 1
            self._scribe.mark(self)
            return
        async with self._one_at_a_time:
            if self._given_up:
                await self._carry_out(write)
            else:
                await self._insist(write)

    async def _insist(self, write: _Write) -> None:
        try:
            async with asyncio.timeout(self._grace_s):
                while not await self._done(write):
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as error:
            self._given_up = True
            raise away() from error

    async def _done(self, write: _Write) -> bool:
        try:
            await self._carry_out(write)
        except Unavailable:
            return False
        return True

    async def _carry_out(self, write: _Write) -> None:
        """A record that is gone, or not as it was left, is put back first: a failover lost the last writes, a restart
        all of them."""
        try:
            await write.carry_out()
        except (NotFound, OutOfRange) as error:
            log.warning("%s It is put back as it was.", error.message)
            await self._store.restore(self._record())
            await self._carry_out_again(write)
        write.note()

    async def _carry_out_again(self, write: _Write) -> None:
        try:
            await write.carry_out()
        except (NotFound, OutOfRange) as error:  # lost again already: the next try puts it back again
            raise Unavailable(
                "The session store goes on losing what is written; retry.", reason="STORE_UNAVAILABLE"
            ) from error

    def _note(self, epoch: int, start: int, tokens: Sequence[int] = (), params: bytes | None = None) -> None:
        del self._tokens[start:]
        self._tokens.extend(tokens)
        self._written = replace(self._written, epoch=epoch, params=self._written.params if params is None else params)

    def _last(self) -> tuple[str, int]:
        """The session under the epoch that was written last: one whose write was interrupted may be nobody's or another
        owner's, and restoring it would overrule that owner."""
        return self._written.id, self._written.epoch

    def _record(self) -> SessionRecord:
        return replace(self._written, tokens=tuple(self._tokens))
