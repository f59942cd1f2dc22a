"""Leases of sessions: which gateway may write a session's record, and the contents of a record.

A gateway takes a session over under the next epoch, which fences off every earlier owner. What the former owner here
still has to write is written first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from weakref import WeakValueDictionary

from gateway.auth.tenant import Tenant
from gateway.sessions.arithmetic_spans import cut, moves_of, same_request, spans_of, with_spans
from gateway.sessions.output_stream import rolled_back
from gateway.store.session_log import SessionLog
from gateway.store.session_store import SessionRecord, SessionStore, store_error
from gateway.store.write_behind import WriteBehindQueue
from slipstream.errors import SlipstreamError
from slipstream.v1 import gateway_pb2, verifier_pb2


def finished_of(record: SessionRecord) -> gateway_pb2.Finished:
    """Returns the session's end; without a reason while the session goes on."""
    return gateway_pb2.Finished.FromString(record.outcome)


def output_of(record: SessionRecord) -> tuple[int, ...]:
    """The tokens that carry the session's text: of one that ended, none behind a stop string."""
    output = record.tokens[record.prompt_length :]
    return output[: finished_of(record).output_tokens] if record.outcome else output


def owner_of(params: bytes) -> str:
    """The tenant whose session has these params in its record."""
    return gateway_pb2.StoredRequest.FromString(params).owner


def request_of(record: SessionRecord) -> gateway_pb2.GenerateRequest:
    """The client's request with every default filled in, without its prompt."""
    return gateway_pb2.GenerateRequest.FromString(record.params)


def stored_request(record: SessionRecord, tenant: Tenant) -> gateway_pb2.StoredRequest:
    """Parses the part of the record beside the request. Raises NotFound for another tenant's session, as for one that
    never was."""
    stored = gateway_pb2.StoredRequest.FromString(record.params)
    if stored.owner != tenant.name:
        raise store_error("MISSING", record.id, 0, 0)
    return stored


class SessionOwnership:
    def __init__(self, store: SessionStore, write_behind: WriteBehindQueue | None, grace_s: float) -> None:
        """`grace_s`: seconds that a write waits for a store that is away. `write_behind`: None where every write is
        waited for."""
        self.store = store
        self._write_behind = write_behind
        self._grace_s = grace_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, session_id: str) -> asyncio.Lock:
        """Held while the session is taken over, until it runs or is let go: to the store all tasks of this gateway are
        one owner."""
        return self._locks.setdefault(session_id, asyncio.Lock())

    async def flush_writes(self, session_id: str) -> None:
        """Wait until everything that this gateway sent to clients of the session is in its log. Raises Unavailable when
        the store is away for too long."""
        if self._write_behind is not None:
            await self._write_behind.written(self._grace_s, session_id)

    def may_take(self, record: SessionRecord) -> bool:
        """Whether no other owner's lease runs. A lease of this gateway's own may be left over from a time when the
        store was away and could not be given up."""
        return not record.leased or record.owner == self.store.owner

    async def take_over(self, session_id: str, *, force: bool = False) -> SessionRecord:
        """Become the session's owner. Raises Aborted while another owner's lease runs, unless by `force`."""
        await self.flush_writes(session_id)  # the next epoch would fence them off
        return await self.store.takeover(session_id, force=force)

    def open_log(self, record: SessionRecord) -> SessionLog:
        """The log of a new session, or of one that was just taken over."""
        return SessionLog(self.store, record, write_behind=self._write_behind, grace_s=self._grace_s)

    async def cut(self, seen: SessionRecord, length: int, edit: Sequence[int], params: bytes) -> int:
        """Leave the session's first `length` tokens and the edit, and no owner, whoever owned it. Returns the epoch.
        Raises Aborted where the session was rolled back since it was `seen`: this may be the late repeat of that."""
        record = await self.take_over(seen.id, force=True)
        log = SessionLog(self.store, record, write_behind=None, grace_s=self._grace_s)
        try:
            if not same_request(record.params, seen.params):
                raise rolled_back(gateway_pb2.StoredRequest.FromString(record.params).revision)
            if length > record.length:  # the store lost the rest
                raise store_error("MISMATCH", seen.id, record.epoch, record.length)
            kept = cut(spans_of(record.params), length - record.prompt_length, len(edit))
            await log.truncate(length, with_spans(params, kept, moves_of(record.params)), edit)
        finally:
            with contextlib.suppress(SlipstreamError):
                await log.release()
        return log.epoch

    async def create_branch(self, record: SessionRecord) -> None:
        """Store a new session without an owner."""
        await self.store.create(record)
        await self.store.release(record.id, record.epoch)

    async def finish_cancelled(self, session_id: str) -> None:
        """Write the outcome CANCELLED, whoever owns the session. One that has ended stays as it is."""
        await self.flush_writes(session_id)
        if (await self.store.read(session_id)).outcome:
            return
        record = await self.store.takeover(session_id, force=True)
        cancelled = gateway_pb2.Finished(
            reason=verifier_pb2.FINISH_REASON_CANCELLED, output_tokens=len(output_of(record))
        )
        await self.store.finish(session_id, record.epoch, record.outcome or cancelled.SerializeToString())
