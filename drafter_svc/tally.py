"""What a drafter counts of its passes."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.proposers import Turn
from slipstream.telemetry import metrics


class Tally:
    def __init__(self) -> None:
        self.seconds = metrics.PASS_SECONDS.histogram()
        self.sessions = metrics.PASS_SESSIONS.histogram()
        self.tokens = metrics.PASS_TOKENS.histogram()
        self.busy_s = 0.0
        self.guessed = self.told = 0

    def began(self, turns: Sequence[Turn]) -> None:
        """A pass runs."""
        self.sessions.observe(len(turns))
        self.tokens.observe(sum(len(turn.pending) + len(turn.nodes) for turn in turns))

    def ended(self, seconds: float) -> None:
        self.busy_s += seconds
        self.seconds.observe(seconds)
