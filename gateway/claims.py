"""A gateway's claims on sessions: whoever wants to own one here takes it over through this."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from gateway.log import Scribe, SessionLog
from gateway.outcome import cancelled
from gateway.store import SessionStore
from gateway.store.record import Record


class Claims:
    def __init__(self, store: SessionStore, scribe: Scribe | None, grace_s: float) -> None:
        self._store = store
        self._scribe = scribe
        self._grace_s = grace_s
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, name: str) -> asyncio.Lock:
        """To be held by whoever takes the session over, until it runs or is let go: to the store all who are here are
        one owner."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def take(self, name: str) -> Record:
        """Raises Aborted while another owner's lease runs."""
        return await self._store.takeover(name)

    def log(self, record: Record) -> SessionLog:
        """Of a new session, or of one that was taken."""
        return SessionLog(self._store, record, scribe=self._scribe, grace_s=self._grace_s)

    async def cut(self, name: str, length: int, edit: Sequence[int], params: bytes) -> int:
        """Whoever owns it: its first `length` tokens and the edit are left, and nobody owns them. Returns the epoch."""
        async with self.turn(name):
            epoch = (await self._store.takeover(name, force=True)).epoch + 1
            await self._store.truncate(name, epoch, length, params)
            await self._store.append(name, epoch, length, edit)
            await self._store.release(name, epoch)
        return epoch

    async def branch(self, record: Record) -> None:
        """Another session, which nobody owns."""
        await self._store.create(record)
        await self._store.release(record.id, record.epoch)

    async def cancel(self, name: str) -> None:
        """Whoever owns it. One that has ended stays as it is."""
        async with self.turn(name):
            record = await self._store.takeover(name, force=True)
            if not record.outcome:
                record = replace(record, outcome=cancelled(record))
            await self._store.finish(name, record.epoch, record.outcome)
