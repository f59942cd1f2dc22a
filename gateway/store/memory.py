"""The session store in this process's memory, for one gateway on one machine."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.store.session_store import TOKEN_BYTES, SessionRecord, pack_tokens, store_error, unpack_tokens


@dataclass(slots=True)
class _Entry:
    epoch: int
    owner: str
    params: bytes
    prompt_length: int
    tokens: bytearray
    outcome: bytes = b""
    lease_until: float = 0.0
    given_up: bool = False
    """Whether the lease was given up: under this epoch for good."""
    expires_at: float = 0.0


class MemoryBackend:
    """The data that several `MemoryStore`s share, as several gateways share one Redis."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # In order of their last write; all live equally long, so the first is the first to expire.
        self.entries: OrderedDict[str, _Entry] = OrderedDict()

    def purge(self) -> None:
        now = self.clock()
        while self.entries and next(iter(self.entries.values())).expires_at <= now:
            self.entries.popitem(last=False)


class MemoryStore:
    def __init__(self, memory: MemoryBackend, *, owner: str, ttl_s: float, lease_s: float) -> None:
        self._memory = memory
        self.owner = owner
        self._ttl_s = ttl_s
        self._lease_s = lease_s

    async def create(self, record: SessionRecord) -> None:
        self._memory.purge()
        tokens = bytearray(pack_tokens(record.tokens))
        entry = _Entry(record.epoch, self.owner, record.params, record.prompt_length, tokens)
        known = self._memory.entries.setdefault(record.id, entry)
        if (known.owner, known.epoch, known.params, known.tokens) != (self.owner, record.epoch, record.params, tokens):
            raise store_error("EXISTS", record.id, known.epoch, _length(known))
        self._renew(record.id, known)

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        entry = self._fenced(session, epoch, raises=not tokens)
        packed = pack_tokens(tokens)
        at, end, present = start * TOKEN_BYTES, start * TOKEN_BYTES + len(packed), len(entry.tokens)
        repeats = epoch == entry.epoch and at >= 0 and end <= present and entry.tokens[at:end] == packed
        if at != present and not repeats:
            raise store_error("MISMATCH", session, entry.epoch, _length(entry))
        if at == present and packed:
            entry.tokens += packed
            entry.outcome = b""
        self._own(session, entry, epoch)

    async def truncate(
        self, session: str, epoch: int, length: int, params: bytes | None = None, tokens: Sequence[int] = ()
    ) -> None:
        entry = self._fenced(session, epoch, raises=True)
        present, higher, edit = _length(entry), epoch > entry.epoch, pack_tokens(tokens)
        repeats = entry.tokens[length * TOKEN_BYTES :] == edit and params in (None, entry.params)
        if not entry.prompt_length <= length <= present or not (higher or repeats):
            raise store_error("MISMATCH", session, entry.epoch, present)
        if higher:
            entry.tokens[length * TOKEN_BYTES :] = edit
            entry.params = entry.params if params is None else params
            entry.outcome = b""
        self._own(session, entry, epoch)

    async def restore(self, record: SessionRecord) -> None:
        self._memory.purge()
        tokens = bytearray(pack_tokens(record.tokens))
        fresh = _Entry(record.epoch, self.owner, record.params, record.prompt_length, tokens)
        entry = self._memory.entries.setdefault(record.id, fresh)
        self._check(record.id, entry, record.epoch)
        if entry.epoch != record.epoch or entry.params != record.params or not entry.tokens.startswith(tokens):
            entry.params, entry.prompt_length, entry.tokens = record.params, record.prompt_length, tokens
            entry.outcome = b""
        self._own(record.id, entry, record.epoch)

    async def takeover(self, session: str, *, force: bool = False) -> SessionRecord:
        entry = self._entry(session)
        if not force and entry.owner != self.owner and entry.lease_until > self._memory.clock():
            raise store_error("LEASED", session, entry.epoch, _length(entry))
        self._own(session, entry, entry.epoch + 1)
        return await self.read(session)

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        self._own(session, self._whole(session, epoch, length), epoch)

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        self._end(session, epoch, length).outcome = outcome

    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        self._end(session, epoch, length)

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        entry = self._entry(session)
        start = min(start, _length(entry))
        return SessionRecord(
            id=session,
            epoch=entry.epoch,
            params=entry.params,
            prompt_length=entry.prompt_length,
            tokens=unpack_tokens(bytes(entry.tokens[start * TOKEN_BYTES :])),
            owner=entry.owner,
            outcome=entry.outcome,
            start=start,
            lease_s=max(0.0, entry.lease_until - self._memory.clock()),
        )

    async def close(self) -> None:
        """Nothing to close."""

    def _entry(self, session: str) -> _Entry:
        self._memory.purge()
        entry = self._memory.entries.get(session)
        if entry is None:
            raise store_error("MISSING", session, 0, 0)
        return entry

    def _fenced(self, session: str, epoch: int, *, raises: bool = False) -> _Entry:
        entry = self._entry(session)
        self._check(session, entry, epoch)
        if epoch > entry.epoch + (raises and entry.owner == self.owner):
            raise store_error("MISMATCH", session, entry.epoch, _length(entry))
        return entry

    def _check(self, session: str, entry: _Entry, epoch: int) -> None:
        if epoch < entry.epoch or (epoch == entry.epoch and entry.owner != self.owner):
            raise store_error("FENCED", session, entry.epoch, _length(entry))

    def _whole(self, session: str, epoch: int, length: int | None) -> _Entry:
        entry = self._fenced(session, epoch)
        if length is not None and length > _length(entry):
            raise store_error("MISMATCH", session, entry.epoch, _length(entry))
        return entry

    def _own(self, session: str, entry: _Entry, epoch: int) -> None:
        entry.given_up = entry.given_up and epoch == entry.epoch
        entry.epoch, entry.owner = epoch, self.owner
        self._renew(session, entry)

    def _end(self, session: str, epoch: int, length: int | None) -> _Entry:
        entry = self._whole(session, epoch, length)
        self._own(session, entry, epoch)
        entry.lease_until, entry.given_up = 0.0, True
        return entry

    def _renew(self, session: str, entry: _Entry) -> None:
        now = self._memory.clock()
        entry.lease_until = 0.0 if entry.given_up else now + self._lease_s
        entry.expires_at = now + self._ttl_s
        self._memory.entries.move_to_end(session)


def _length(entry: _Entry) -> int:
    return len(entry.tokens) // TOKEN_BYTES
