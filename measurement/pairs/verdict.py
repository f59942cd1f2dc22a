"""Whether a drafter is worth serving: one rule for the report of its training and for `slipstream doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_ACCURACY = 0.3
"""Share of first candidates that must be right: a verifier warns of a head with less."""
LEAST_PLACES = 400
"""Places that a verdict needs: of fewer, a few texts decide."""
LEAST_GAIN = 1.1
"""Predicted tokens/s, over those without a drafter."""
MOST_LEVEL = 0.6
"""Seconds of a level of candidates, over those of a target's pass: a drafter that takes more does not pay, though it
guesses ahead on a machine of its own (docs/gpu.md)."""


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Figures that a verdict is made of; greedy texts that loop are left out of all of them."""

    places: int
    """Tokens of texts at which the drafter was tried."""
    first: float | None
    """Share of them where its first candidate was the text's token; None for a lookup, which seldom has one."""
    gains: Mapping[int, float]
    """Predicted tokens/s over those without a drafter, by the candidates of a pass."""

    @property
    def best(self) -> tuple[int, float]:
        """The number of candidates with the largest gain, and the gain."""
        size = max(self.gains, key=lambda each: self.gains[each])
        return size, self.gains[size]

    @property
    def enough(self) -> bool:
        return self.places >= LEAST_PLACES

    @property
    def accurate(self) -> bool:
        return self.first is None or self.first >= LEAST_ACCURACY

    @property
    def ships(self) -> bool:
        return self.enough and self.accurate and self.best[1] >= LEAST_GAIN

    @property
    def reason(self) -> str:
        """The figures of the verdict, and what was wanted where they do not reach it; without a full stop."""
        if not self.enough:
            return f"only {self.places} places were measured, and {LEAST_PLACES} are wanted"
        size, gain = self.best
        first = "" if self.first is None else f"{self.first:.0%} of the first candidates are right, and "
        figures = (
            f"{first}with {size} candidates a pass {gain:.2f} times the tokens/s without a drafter are predicted for "
            "one session on this machine"
        )
        wanted = "" if self.first is None else f"{LEAST_ACCURACY:.0%} and "
        return figures if self.ships else f"{figures}; at least {wanted}{LEAST_GAIN:g} times are wanted"
