"""The session log: the only truth about a session, behind one small protocol.

Every write is fenced and idempotent, so it may be repeated after a lost reply:

- fenced: a lower epoch than the stored one is refused, an equal one of another owner too; a higher one is adopted.
  Raising the epoch is therefore an append of nothing under the next one.
- idempotent: a write that finds its own effect already there does nothing.
- every write renews the owner's lease and the record's time to live.

`tokens` are prompt and output together; `start` and `length` count from the prompt's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.store.record import Record


class SessionStore(Protocol):
    """Belongs to one owner (one gateway). Every method raises Unavailable when the store cannot be reached, and every
    method but `create` raises NotFound for a session that never was or has expired."""

    async def create(self, record: Record) -> None:
        """Raises FailedPrecondition when another session has the id."""

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        """Tokens [start, start + len(tokens)). Raises Aborted when fenced; OutOfRange when `start` is not the length
        of the log and the log does not already hold the same tokens there."""

    async def truncate(self, session: str, epoch: int, length: int) -> None:
        """Cut the log back to `length` under a higher epoch. Raises Aborted when fenced; OutOfRange for a length beyond
        the log, inside the prompt, or shorter under an epoch that is not higher."""

    async def takeover(self, session: str) -> Record:
        """Become the owner under the next epoch. Raises Aborted while another owner's lease runs."""

    async def finish(self, session: str, epoch: int, outcome: bytes) -> None:
        """Record how the session ended and give the lease up. Raises Aborted when fenced."""

    async def read(self, session: str) -> Record:
        """The record as it is."""

    async def close(self) -> None:
        """Give the connections up."""
