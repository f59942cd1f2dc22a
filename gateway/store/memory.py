"""The embedded store: the same contract in this process, for one gateway on one machine."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.store.record import TOKEN_BYTES, Record, pack, refusal, unpack


@dataclass(slots=True)
class _Entry:
    epoch: int
    owner: str
    params: bytes
    prompt_length: int
    tokens: bytearray
    outcome: bytes = b""
    lease_until: float = 0.0
    expires_at: float = 0.0


class Memory:
    """What several `MemoryStore`s share, as several gateways share one Redis."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # In order of their last write; all live equally long, so the first is the first to expire.
        self.entries: OrderedDict[str, _Entry] = OrderedDict()

    def purge(self) -> None:
        now = self.clock()
        while self.entries and next(iter(self.entries.values())).expires_at <= now:
            self.entries.popitem(last=False)


class MemoryStore:
    def __init__(self, memory: Memory, *, owner: str, ttl_s: float, lease_s: float) -> None:
        self._memory = memory
        self._owner = owner
        self._ttl_s = ttl_s
        self._lease_s = lease_s

    async def create(self, record: Record) -> None:
        self._memory.purge()
        tokens = bytearray(pack(record.tokens))
        entry = _Entry(record.epoch, self._owner, record.params, record.prompt_length, tokens)
        known = self._memory.entries.setdefault(record.id, entry)
        if (known.owner, known.epoch, known.params, known.tokens) != (self._owner, record.epoch, record.params, tokens):
            raise refusal("EXISTS", record.id, known.epoch, _length(known))
        self._renew(record.id, known)

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        entry = self._fenced(session, epoch)
        packed = pack(tokens)
        at, end = start * TOKEN_BYTES, start * TOKEN_BYTES + len(packed)
        if at == len(entry.tokens):
            entry.tokens += packed
        elif at < 0 or end > len(entry.tokens) or entry.tokens[at:end] != packed:
            raise refusal("MISMATCH", session, entry.epoch, _length(entry))
        self._own(session, entry, epoch)

    async def truncate(self, session: str, epoch: int, length: int) -> None:
        entry = self._fenced(session, epoch)
        present = _length(entry)
        if not entry.prompt_length <= length <= present or (length < present and epoch == entry.epoch):
            raise refusal("MISMATCH", session, entry.epoch, present)
        del entry.tokens[length * TOKEN_BYTES :]
        self._own(session, entry, epoch)

    async def takeover(self, session: str) -> Record:
        entry = self._entry(session)
        if entry.owner != self._owner and entry.lease_until > self._memory.clock():
            raise refusal("LEASED", session, entry.epoch, _length(entry))
        entry.outcome = b""
        self._own(session, entry, entry.epoch + 1)
        return await self.read(session)

    async def finish(self, session: str, epoch: int, outcome: bytes) -> None:
        entry = self._fenced(session, epoch)
        entry.outcome = outcome
        self._own(session, entry, epoch)
        entry.lease_until = 0.0

    async def read(self, session: str) -> Record:
        entry = self._entry(session)
        return Record(
            id=session,
            epoch=entry.epoch,
            params=entry.params,
            prompt_length=entry.prompt_length,
            tokens=unpack(bytes(entry.tokens)),
            owner=entry.owner,
            outcome=entry.outcome,
        )

    async def close(self) -> None:
        """Nothing to give up."""

    def _entry(self, session: str) -> _Entry:
        self._memory.purge()
        entry = self._memory.entries.get(session)
        if entry is None:
            raise refusal("MISSING", session, 0, 0)
        return entry

    def _fenced(self, session: str, epoch: int) -> _Entry:
        entry = self._entry(session)
        if epoch < entry.epoch or (epoch == entry.epoch and entry.owner != self._owner):
            raise refusal("FENCED", session, entry.epoch, _length(entry))
        return entry

    def _own(self, session: str, entry: _Entry, epoch: int) -> None:
        entry.epoch, entry.owner = epoch, self._owner
        self._renew(session, entry)

    def _renew(self, session: str, entry: _Entry) -> None:
        now = self._memory.clock()
        entry.lease_until, entry.expires_at = now + self._lease_s, now + self._ttl_s
        self._memory.entries.move_to_end(session)


def _length(entry: _Entry) -> int:
    return len(entry.tokens) // TOKEN_BYTES
