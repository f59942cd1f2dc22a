"""What a simulated verifier is set to, and what one of its steps holds."""

from __future__ import annotations

from dataclasses import dataclass

from capacity.cost import Cost
from capacity.guessing import Acceptance, SimulatedGuess
from capacity.session import SimulatedSession


@dataclass(frozen=True, slots=True)
class Verifying:
    """The settings of a verifier."""

    cost: Cost
    acceptance: Acceptance
    host_s: float = 0.0
    """Seconds between two passes in which the device waits: planning, committing, talking."""
    host_session_s: float = 0.0
    """What each session in the step adds to that."""
    sessions: int = 1024
    kv_tokens: int = 1 << 40
    max_draft_tokens: int = 8
    step_tokens: int = 512
    prefill_tokens: int = 256
    max_wait_s: float = 0.25
    draft: Cost | None = None
    """Co-located speculation: what a pass of the draft model costs on this device, between the target's passes."""
    expand: int = 4

    def limit(self, session: SimulatedSession) -> int:
        """Most candidates of the session in one step."""
        if session.drafter is None and self.draft is None:
            return 0
        return max(0, min(self.max_draft_tokens, session.left - 1))


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    decoding: list[SimulatedSession]
    chosen: list[list[SimulatedGuess]]
    """Candidates of each of them."""
    paths: list[list[float]]
    """Path probabilities of each one's best candidates, of which the first are chosen."""
    reading: dict[SimulatedSession, int]
    tokens: float
    """Expected to be committed."""
    seconds: float

    @property
    def sessions(self) -> int:
        """That decode."""
        return len(self.decoding)

    @property
    def size(self) -> int:
        return len(self.decoding) + sum(map(len, self.chosen)) + sum(self.reading.values())
