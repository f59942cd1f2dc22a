"""What a drafter counts of its passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from drafter_svc.proposers import DraftRequest
from slipstream.telemetry import metrics


class StepStats:
    def __init__(self) -> None:
        self.seconds = metrics.PASS_SECONDS.histogram()
        self.sessions = metrics.PASS_SESSIONS.histogram()
        self.tokens = metrics.PASS_TOKENS.histogram()
        self.busy_s = 0.0
        self.needed_s = 0.0
        """Of each session in a pass, by the chance that its text needs the guess."""
        self._needing = 0.0
        self.guessed = self.told = 0

    def began(self, turns: Sequence[DraftRequest]) -> None:
        """A pass runs."""
        self.sessions.observe(len(turns))
        self.tokens.observe(sum(len(turn.pending) + len(turn.nodes) for turn in turns))
        self._needing = sum(map(_chance, turns))

    def ended(self, seconds: float) -> None:
        self.busy_s += seconds
        self.needed_s += seconds * self._needing
        self.seconds.observe(seconds)


def _chance(turn: DraftRequest) -> float:
    """That the text goes by the likeliest place that the turn guesses on. A drafter with nothing to catch up on is as
    busy as any, but on places that are ever less likely. What is committed, or a prompt to be read, is certain."""
    if not turn.starts:
        return 1.0
    return math.exp(turn.starts[0].path_log_prob - turn.session.tree.root.path_log_prob)
