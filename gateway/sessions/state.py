"""Where a session is in its life on one gateway."""

from __future__ import annotations

from enum import IntEnum, auto


class SessionState(IntEnum):
    """In order. A session goes forward, and back only between WAITING and DECODING, or to FOLLOWING when its run is
    over: the next owner's log may be followed then."""

    FOLLOWING = auto()
    """Another gateway may run it; this one copies the log."""
    WAITING = auto()
    """It runs here and is open on no verifier: it waits for one, or for its clients."""
    DECODING = auto()
    """It runs here and is open on a verifier."""
    CANCELLED = auto()
    """It runs here, and ends as soon as the rounds that came are written."""
    ENDING = auto()
    """It runs here; nothing is left but to write how it ended, or that it has no owner."""
    LEFT = auto()
    """Its last client left, it was rolled back, or the gateway ends: its task ends, and releases it first."""


class SessionLife:
    """The state of one session, which its entry and its run share."""

    def __init__(self) -> None:
        self.state = SessionState.FOLLOWING

    def enter(self, state: SessionState) -> None:
        """Go on to this state, unless the session is cancelled, ending or left and the state comes before that."""
        if self.state < SessionState.CANCELLED or state > self.state:
            self.state = state

    def end_run(self) -> None:
        """The run is over: what follows is another owner's, if anything does."""
        if not self.left:
            self.state = SessionState.FOLLOWING

    @property
    def cancelled(self) -> bool:
        return self.state is SessionState.CANCELLED

    @property
    def left(self) -> bool:
        return self.state is SessionState.LEFT

    @property
    def decoding(self) -> bool:
        """Whether the session goes on without a verifier being found first."""
        return self.state in (SessionState.DECODING, SessionState.CANCELLED)
