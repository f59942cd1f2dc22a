"""The contract of a session store: records of sessions, the only truth about them.

Every write is fenced and idempotent, so it may be repeated after a lost reply:

- fenced: a lower epoch than the stored one is refused, an equal one of another owner too. An owner raises its epoch by
  one with `truncate` or an append of nothing; only `takeover` and `restore` change the owner. Every other write that is
  ahead of the stored epoch is refused: something that was written is gone, and its owner may `restore` it.
- idempotent: a write that finds its own effect already there does nothing, however late it comes. A takeover is known
  by its nonce.
- every write renews the owner's lease and the record's time to live. A lease given up (`finish`, `release`) comes back
  only under a higher epoch.

`tokens` are prompt and output together; `start` and `length` count from the prompt's first token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.errors import Aborted, FailedPrecondition, NotFound, OutOfRange, SlipstreamError

TOKEN_BYTES = 4
KEPT_TAKEOVERS = 8
"""Takeovers of one session whose repeats are known."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session, as a store keeps it."""

    id: str
    epoch: int
    params: bytes
    """The request without its prompt, every default filled in: a GenerateRequest and a StoredRequest, serialised."""
    prompt_length: int
    tokens: tuple[int, ...]
    """Prompt and output, from `start` on."""
    owner: str = ""
    """Set by the store, as are the fields below."""
    outcome: bytes = b""
    """The session's end, a serialised Finished. Empty while the log grows, and once it changed again."""
    start: int = 0
    """Position of the first of `tokens`: above 0 where only a tail was read."""
    lease_s: float = field(default=0.0, compare=False)
    """Seconds that the owner's lease still runs, by the store's clock; 0 when it lapsed or was given up."""

    @property
    def length(self) -> int:
        """Length of the whole log, in tokens."""
        return self.start + len(self.tokens)

    @property
    def leased(self) -> bool:
        """Whether the owner's lease runs: then no other gateway can take the session over."""
        return self.lease_s > 0.0


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """Use of a server's memory, and its policy once that is full."""

    used_bytes: int
    max_bytes: int
    """0: no limit of its own."""
    policy: str
    """Redis' `maxmemory-policy`; empty where the server does not report it."""

    @property
    def evicts(self) -> bool:
        """True for a server that may drop records early. All have a time to live: every policy but one finds them."""
        return bool(self.max_bytes) and self.policy not in ("noeviction", "")

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0


class SessionStore(Protocol):
    """The store as one owner (one gateway) sees it.

    Every method raises Unavailable when the store cannot be reached. All but `create`, `restore` and `delete` raise
    NotFound for a session that never was or has expired. All that take an epoch raise Aborted when it is fenced, and
    OutOfRange when it is ahead.
    """

    @property
    def owner(self) -> str:
        """The owner's name in records."""

    async def create(self, record: SessionRecord) -> None:
        """Raises FailedPrecondition when another session has the id."""

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        """Write tokens [start, start + len(tokens)). Raises OutOfRange when `start` is not the length of the log and
        the log does not already hold the same tokens there, written under this epoch. Appending clears the outcome."""

    async def truncate(
        self, session: str, epoch: int, length: int, params: bytes | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Cut the log back to `length` under a higher epoch, with other `params` from now on where they are given, and
        `tokens` behind it. Both in one write, or a store that fails over could keep the cut and lose the tokens. Clears
        the outcome. Raises OutOfRange for a length beyond the log or inside the prompt, and for
        another log or other params under an epoch that is not higher."""

    async def restore(self, record: SessionRecord) -> None:
        """Put back what its owner had written, after the store lost it in a failover or a restart. What was
        appended since under the same epoch stays; any higher epoch is adopted. Raises Aborted when fenced."""

    async def takeover(self, session: str, *, force: bool = False, nonce: str = "") -> SessionRecord:
        """Become the owner under the next epoch, of a finished session too: its outcome stays until the log changes.
        Raises Aborted while another owner's lease runs, unless `force`: the session's own client wants it. A repeat
        with the same `nonce`, as late as KEPT_TAKEOVERS - 1 other takeovers, changes nothing, and raises Aborted where
        the session has another owner by then. Empty: a nonce is made for this call."""

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        """Renew the owner's lease and the record's time to live, and write nothing else. Raises OutOfRange for a log
        shorter than `length`."""

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        """Record how the session ended and give the lease up. Raises OutOfRange for a log shorter than `length`."""

    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        """Give the lease up without an outcome: any gateway may take the session over at once. Raises OutOfRange for a
        log shorter than `length`."""

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        """The record with its tokens from `start` on. Where the log ends before, it has no tokens and its `start` is
        the end of the log: a reader that finds `start` moved back sees that the log was cut."""

    async def delete(self, session: str) -> None:
        """Remove the record, whoever owns it; one that is not there is removed already. Its owner, if one still runs,
        may restore it: end the session first."""

    async def memory_usage(self) -> StoreMemory | None:
        """None for a store in its process's memory. Of several servers the one that evicts, else the fullest."""

    async def close(self) -> None:
        """Close the connections."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian unsigned 32-bit integers, one for each token; `unpack_tokens` is the inverse."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def store_error(cause: str, session: str, epoch: int, length: int) -> SlipstreamError:
    """The typed error of a refused operation; `epoch` and `length` are the stored ones."""
    if cause == "MISSING":
        sentence = f"There is no session {session!r}: it never was, or its record has expired."
        return NotFound(sentence, reason="NO_SESSION")
    if cause == "EXISTS":
        return FailedPrecondition(f"Session {session} exists already; choose another id.", reason="SESSION_EXISTS")
    if cause == "FENCED":
        return Aborted(f"Session {session} is at epoch {epoch} and has another owner; forget it.", reason="FENCED")
    if cause == "LEASED":
        return Aborted(f"Session {session} has an owner whose lease runs; try again when it lapsed.", reason="LEASED")
    return OutOfRange(
        f"The log of session {session} holds {length} tokens under epoch {epoch}; the write fits neither its end nor "
        "its content.",
        reason="LOG_MISMATCH",
    )
