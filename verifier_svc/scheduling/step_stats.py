"""What a verifier counts of its steps, while the next one runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slipstream.telemetry import metrics


class StepStats:
    def __init__(self) -> None:
        self.seconds = metrics.STEP_SECONDS.histogram()
        self.sessions = metrics.STEP_SESSIONS.histogram()
        self.tokens = metrics.STEP_TOKENS.histogram()
        self.waited_s = 0.0
        """In which steps were held back for candidates."""
        self.drafted: Counter[int] = Counter()
        """Candidates verified, by depth."""
        self.lengths: Counter[int] = Counter()
        """Rounds with candidates, by how many they accepted."""
        self.rolled_back = 0
        self.rolled_back_s = 0.0

    def step(self, sessions: int, tokens: int, seconds: float, waited_s: float) -> None:
        self.seconds.observe(seconds)
        self.sessions.observe(sessions)
        self.tokens.observe(tokens)
        self.waited_s += waited_s

    def judged(self, depths: Sequence[int], accepted: int) -> None:
        """A round's candidates, and how many of them were accepted."""
        for depth in depths:
            self.drafted[depth] += 1
        self.lengths[accepted] += 1
        self.rolled_back += len(depths) - accepted

    @property
    def accepted(self) -> Counter[int]:
        """Candidates accepted, by depth: a path of three has one at each of three."""
        reached: Counter[int] = Counter()
        for length, rounds in self.lengths.items():
            reached.update(dict.fromkeys(range(1, length + 1), rounds))
        return reached
