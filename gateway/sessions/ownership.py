"""A gateway's claims on sessions: whoever wants to own one here takes it over through this."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from weakref import WeakValueDictionary

from gateway.sessions.outcome import cancelled, rolled_back
from gateway.store.session_log import SessionLog, WriteBehindQueue
from gateway.store.session_store import SessionRecord, SessionStore, store_error
from slipstream.errors import SlipstreamError


class SessionOwnership:
    def __init__(self, store: SessionStore, scribe: WriteBehindQueue | None, grace_s: float) -> None:
        self.store = store
        self._scribe = scribe
        self._grace_s = grace_s
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, name: str) -> asyncio.Lock:
        """To be held by whoever takes the session over, until it runs or is let go: to the store all who are here are
        one owner."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def written(self, name: str) -> None:
        """What was said of the session here is in its log. Raises Unavailable when the store is away for too long."""
        if self._scribe is not None:
            await self._scribe.written(self._grace_s, name)

    def may_take(self, record: SessionRecord) -> bool:
        """Whether no other owner's lease runs. One of this gateway's own is left where nobody could give it up: the
        store was away."""
        return not record.leased or record.owner == self.store.owner

    async def take(self, name: str, *, force: bool = False) -> SessionRecord:
        """What is still to be written comes first: the next epoch would fence it off. Raises Aborted while another
        owner's lease runs, unless by `force`."""
        await self.written(name)
        return await self.store.takeover(name, force=force)

    def log(self, record: SessionRecord) -> SessionLog:
        """Of a new session, or of one that was taken."""
        return SessionLog(self.store, record, write_behind=self._scribe, grace_s=self._grace_s)

    async def cut(self, seen: SessionRecord, length: int, edit: Sequence[int], params: bytes) -> int:
        """Whoever owns it: its first `length` tokens and the edit are left, and nobody owns them. Returns the epoch.
        Raises Aborted where the session was rolled back since it was `seen`: this may be the late repeat of that."""
        record = await self.take(seen.id, force=True)
        log = SessionLog(self.store, record, write_behind=None, grace_s=self._grace_s)
        try:
            if record.params != seen.params:
                raise rolled_back()
            if length > record.length:  # the store lost the rest
                raise store_error("MISMATCH", seen.id, record.epoch, record.length)
            await log.truncate(length, params, edit)
        finally:
            with contextlib.suppress(SlipstreamError):
                await log.release()
        return log.epoch

    async def branch(self, record: SessionRecord) -> None:
        """Another session, which nobody owns."""
        await self.store.create(record)
        await self.store.release(record.id, record.epoch)

    async def cancel(self, name: str) -> None:
        """Whoever owns it. One that has ended stays as it is."""
        await self.written(name)
        if (await self.store.read(name)).outcome:
            return
        record = await self.store.takeover(name, force=True)
        await self.store.finish(name, record.epoch, record.outcome or cancelled(record))
