"""What a store keeps of one session, and what its refusals are called."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.errors import Aborted, FailedPrecondition, NotFound, OutOfRange, SlipstreamError

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class SessionRecord:
    id: str
    epoch: int
    params: bytes
    """What the client asked for, every default filled in: a serialised StoredRequest."""
    prompt_length: int
    tokens: tuple[int, ...]
    """Prompt and output, from `start` on."""
    owner: str = ""
    """Filled in by the store, as is what follows."""
    outcome: bytes = b""
    """How the log as it stands was ended: a serialised Finished. Empty while it grows, and once it changed again."""
    start: int = 0
    """Position of the first of `tokens`: above 0 where a tail was asked for."""
    lease_s: float = field(default=0.0, compare=False)
    """How long the owner's lease still runs, as the store's clock says; 0 when it lapsed or was given up."""

    @property
    def length(self) -> int:
        """Of the whole log, in tokens."""
        return self.start + len(self.tokens)

    @property
    def leased(self) -> bool:
        """Whether an owner lives, as far as the store knows: then nobody else can take the session over."""
        return self.lease_s > 0.0


def pack(tokens: Sequence[int]) -> bytes:
    """Little-endian unsigned 32-bit integers, one for each token."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> tuple[int, ...]:
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def refusal(word: str, session: str, epoch: int, length: int) -> SlipstreamError:
    """The typed error of a refused write; `epoch` and `length` are the stored ones."""
    if word == "MISSING":
        return NotFound(f"There is no session {session}: it never was, or its record has expired.", reason="NO_SESSION")
    if word == "EXISTS":
        return FailedPrecondition(f"Session {session} exists already; choose another id.", reason="SESSION_EXISTS")
    if word == "FENCED":
        return Aborted(f"Session {session} is at epoch {epoch} and has another owner; forget it.", reason="FENCED")
    if word == "LEASED":
        return Aborted(f"Session {session} has an owner whose lease runs; try again when it lapsed.", reason="LEASED")
    return OutOfRange(
        f"The log of session {session} holds {length} tokens under epoch {epoch}; the write fits neither its end nor "
        "its content.",
        reason="LOG_MISMATCH",
    )
