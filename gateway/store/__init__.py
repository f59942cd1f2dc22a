"""The session log: the only truth about a session, behind one small protocol.

Every write is fenced and idempotent, so it may be repeated after a lost reply:

- fenced: a lower epoch than the stored one is refused, an equal one of another owner too. An owner raises its epoch by
  one with `truncate` or an append of nothing; only `takeover` and `restore` change the owner. Every other write that is
  ahead of the stored epoch is refused: something that was written is gone, and its owner may `restore` it.
- idempotent: a write that finds its own effect already there does nothing, however late it comes.
- every write renews the owner's lease and the record's time to live. A lease given up (`finish`, `release`) comes back
  only under a higher epoch.

`tokens` are prompt and output together; `start` and `length` count from the prompt's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.store.record import SessionRecord


class SessionStore(Protocol):
    """Belongs to one owner (one gateway). Every method raises Unavailable when the store cannot be reached, every one
    but `create` and `restore` NotFound for a session that never was or has expired, and every one that is given an
    epoch Aborted when it is fenced, and OutOfRange when it is ahead."""

    @property
    def owner(self) -> str:
        """As records name it."""

    async def create(self, record: SessionRecord) -> None:
        """Raises FailedPrecondition when another session has the id."""

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        """Tokens [start, start + len(tokens)). Raises OutOfRange when `start` is not the length of the log and the log
        does not already hold the same tokens there, written under this epoch. A log that grows has no outcome."""

    async def truncate(
        self, session: str, epoch: int, length: int, params: bytes | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Cut the log back to `length` under a higher epoch, with other `params` from now on where they are given, and
        `tokens` behind: at once, or a store that fails over could keep the cut and lose them, and nobody would say them
        again. Its outcome is of the past. Raises OutOfRange for a length beyond the log or inside the prompt, and for
        another log or other params under an epoch that is not higher."""

    async def restore(self, record: SessionRecord) -> None:
        """Put back what its owner knows was written, after the store lost it: a failover, a restart without data. What
        was appended since under the same epoch stays; any higher epoch is adopted. Raises Aborted when fenced."""

    async def takeover(self, session: str, *, force: bool = False) -> SessionRecord:
        """Become the owner under the next epoch, of a finished session too: its outcome stays until the log changes.
        Raises Aborted while another owner's lease runs, unless the session's client itself wants it (`force`)."""

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        """The owner lives: its lease and the record's time to live, and nothing else. Raises OutOfRange for a log
        shorter than `length`."""

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        """Record how the session ended and give the lease up. Raises OutOfRange for a log shorter than `length`."""

    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        """Give the lease up without an outcome: suspended, anybody may take the session over at once. Raises
        OutOfRange for a log shorter than `length`."""

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        """The record as it is, with its tokens from `start` on; with none, and `start` at the end, where the log ends
        before. So a follower that finds `start` moved back knows that the log was cut."""

    async def close(self) -> None:
        """Give the connections up."""
