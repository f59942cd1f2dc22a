"""The session store in this process's memory, for one gateway on one machine."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.store.session_store import (
    KEPT_TAKEOVERS,
    TOKEN_BYTES,
    SessionRecord,
    pack_tokens,
    store_error,
    unpack_tokens,
)
from slipstream.errors import ResourceExhausted

ENTRY_BYTES = 1024
"""Bytes that a session takes besides its texts, about."""
RETRY_S = 1.0
"""Seconds until a retry where the store is full: when a session ends is not known."""


@dataclass(slots=True)
class _Entry:
    epoch: int
    owner: str
    tenant: str
    params: bytes
    prompt_length: int
    tokens: bytearray
    outcome: bytes = b""
    lease_until: float = 0.0
    given_up: bool = False
    """Whether the lease was given up: under this epoch for good."""
    takeovers: tuple[str, ...] = ()
    """Nonces of the latest takeovers."""
    expires_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes, about."""
        return ENTRY_BYTES + len(self.params) + len(self.tokens) + len(self.outcome)


class MemoryBackend:
    """The data that several `MemoryStore`s share, as several gateways share one Redis. Holds at most `most_bytes`:
    above that, ended sessions are dropped, then suspended ones, the eldest first; running ones never. They are those of
    the tenant that holds the most bytes, and never of one that holds less than the tenant that needs the room."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        most_bytes: float = math.inf,
        tenant_of: Callable[[bytes], str] = lambda params: "",
    ) -> None:
        """`tenant_of`: of a record's params."""
        self.clock = clock
        self.tenant_of = tenant_of
        self._most_bytes = most_bytes
        self._held: Counter[str] = Counter()
        """Bytes of each tenant's sessions."""
        self._sizes: dict[str, int] = {}
        self._ended: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """By tenant, sessions with an outcome, in the order in which they ended."""
        self._suspended: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """By tenant, sessions whose lease was given up without an outcome, in that order."""
        # In order of their last write; all live equally long, so the first is the first to expire.
        self.entries: OrderedDict[str, _Entry] = OrderedDict()

    def purge(self) -> None:
        now = self.clock()
        while self.entries and next(iter(self.entries.values())).expires_at <= now:
            self.drop(next(iter(self.entries)))

    def make_room(self, growth: int, tenant: str, session: str = "") -> None:
        """Drop sessions until `growth` more bytes of the tenant fit, but for this one. Raises ResourceExhausted where
        there are none that may be dropped for it."""
        while self._held.total() + growth > self._most_bytes:
            if eldest := self._eldest_idle(tenant, session):
                self.drop(eldest)
                continue
            raise ResourceExhausted(
                "The session store is full of running sessions, or of those of keys that hold less than this one; "
                "retry later, or raise GATEWAY_MEMORY_STORE_BYTES.",
                reason="STORE_FULL",
                retry_s=RETRY_S,
            )

    def account(self, session: str, entry: _Entry) -> None:
        """The session's entry was written."""
        self._held[entry.tenant] += entry.size - self._sizes.get(session, 0)
        self._sizes[session] = entry.size
        for order, belongs in (
            (self._ended[entry.tenant], entry.given_up and bool(entry.outcome)),
            (self._suspended[entry.tenant], entry.given_up and not entry.outcome),
        ):
            if belongs:
                order[session] = None
            else:
                order.pop(session, None)

    def _eldest_idle(self, tenant: str, session: str) -> str:
        """The session to drop for this tenant's; empty for none."""
        greedy = [each for each in self._held if self._held[each] >= self._held[tenant]]
        greedy.sort(key=lambda each: (self._held[each], each == tenant), reverse=True)
        idle = (name for order in (self._ended, self._suspended) for each in greedy for name in order.get(each, ()))
        return next((name for name in idle if name != session), "")

    def drop(self, session: str) -> None:
        tenant = self.entries.pop(session).tenant
        self._held[tenant] -= self._sizes.pop(session, 0)
        for order in (self._ended, self._suspended):
            order[tenant].pop(session, None)
            if not order[tenant]:
                del order[tenant]
        if not self._held[tenant]:
            del self._held[tenant]


class MemoryStore:
    def __init__(self, memory: MemoryBackend, *, owner: str, ttl_s: float, lease_s: float) -> None:
        self._memory = memory
        self.owner = owner
        self._ttl_s = ttl_s
        self._lease_s = lease_s

    async def create(self, record: SessionRecord) -> None:
        self._memory.purge()
        tokens = bytearray(pack_tokens(record.tokens))
        tenant = self._memory.tenant_of(record.params)
        entry = _Entry(record.epoch, self.owner, tenant, record.params, record.prompt_length, tokens)
        if record.id not in self._memory.entries:
            self._memory.make_room(entry.size, tenant)
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
            self._memory.make_room(len(packed), entry.tenant, session)
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
            params = entry.params if params is None else params
            growth = len(edit) - (present - length) * TOKEN_BYTES + len(params) - len(entry.params)
            self._memory.make_room(growth, entry.tenant, session)
            entry.tokens[length * TOKEN_BYTES :] = edit
            entry.params = params
            entry.outcome = b""
        self._own(session, entry, epoch)

    async def restore(self, record: SessionRecord) -> None:
        self._memory.purge()
        tokens = bytearray(pack_tokens(record.tokens))
        tenant = self._memory.tenant_of(record.params)
        fresh = _Entry(record.epoch, self.owner, tenant, record.params, record.prompt_length, tokens)
        known = self._memory.entries.get(record.id)
        if known is not None:
            self._check(record.id, known, record.epoch)
        self._memory.make_room(fresh.size - (known.size if known is not None else 0), tenant, record.id)
        entry = self._memory.entries.setdefault(record.id, fresh)
        if entry.epoch != record.epoch or entry.params != record.params or not entry.tokens.startswith(tokens):
            entry.params, entry.prompt_length, entry.tokens = record.params, record.prompt_length, tokens
            entry.outcome = b""
        self._own(record.id, entry, record.epoch)

    async def takeover(self, session: str, *, force: bool = False, nonce: str = "") -> SessionRecord:
        entry = self._entry(session)
        if nonce and nonce in entry.takeovers:  # done long ago
            self._check(session, entry, entry.epoch)
            return await self.read(session)
        if not force and entry.owner != self.owner and entry.lease_until > self._memory.clock():
            raise store_error("LEASED", session, entry.epoch, _length(entry))
        self._own(session, entry, entry.epoch + 1)
        entry.takeovers = (*entry.takeovers, nonce)[-KEPT_TAKEOVERS:]
        return await self.read(session)

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        self._own(session, self._whole(session, epoch, length), epoch)

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        entry = self._end(session, epoch, length)
        entry.outcome = outcome
        self._memory.account(session, entry)

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

    async def delete(self, session: str) -> None:
        self._memory.purge()
        if session in self._memory.entries:
            self._memory.drop(session)

    async def memory_usage(self) -> None:
        """Nothing to watch: a store that is full drops ended sessions, and by design."""

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
        self._memory.account(session, entry)
        return entry

    def _renew(self, session: str, entry: _Entry) -> None:
        now = self._memory.clock()
        entry.lease_until = 0.0 if entry.given_up else now + self._lease_s
        entry.expires_at = now + self._ttl_s
        self._memory.entries.move_to_end(session)
        self._memory.account(session, entry)


def _length(entry: _Entry) -> int:
    return len(entry.tokens) // TOKEN_BYTES
