"""What a candidate must be worth: the path probability below which it does not pay for its place in a step.

One more token in a step of n costs t(n + 1) - t(n) seconds, and before that some microseconds of the verifier's own
thread, h, to be read, grafted, weighed and dropped; in that time the verifier would commit R tokens a second. So a
candidate pays iff it is accepted with a probability above

    price = R * (dt/dn + h),

the marginal form of what `budget` decides node by node, and h, which is spent before that. With one session h does not
count; with thousands of tokens a second it does. Drafters are told: they neither send nor prepare what will not be
taken, and where no candidate pays (a busy verifier whose passes take time in proportion to their tokens: the price is
1) they stop altogether, so that speculation that is off costs nothing anywhere. The price needs no candidates to be
known, so they start again by themselves when the load falls.
"""

from __future__ import annotations

from collections.abc import Callable

LEVELS = (0.04, 0.08, 0.15, 0.25, 0.4, 0.6)
"""Path probabilities that drafters are told; the lowest is what it costs to send and graft a candidate at all."""
PAUSE = 1.0
"""Instead of a level: no candidate pays."""
DEAR = 0.8
"""Above this price nothing pays: hardly any first candidate is surer."""
HANDLING_S = 25e-6
"""h, measured (`python -m benchmarks.limit`: CPU of a round with and without speculation, by candidates that came)."""
WEIGHT = 0.1
"""Of a new price in the average."""
SLACK = 1.25
"""The price must have fallen below a level by so much before drafters are told a lower one: talk costs too."""


class Price:
    """Smoothed, and in steps."""

    def __init__(self, floor: float = LEVELS[0]) -> None:
        self._levels = sorted({floor, *(level for level in LEVELS if level > floor), PAUSE})
        self.average = 0.0
        """In tokens; what one more candidate costs the step that takes it."""
        self._observed = False
        self.threshold = self._levels[0]
        """Path probability that a candidate must have; PAUSE: none is wanted."""

    def observe(self, rate: float, seconds: Callable[[int], float], tokens: int) -> bool:
        """A step of so many tokens, where `rate` tokens are committed a second. Whether the threshold changed."""
        window = max(4, tokens // 8)  # the curve is linear between buckets: a wider look evens its corners out
        price = rate * ((seconds(tokens + window) - seconds(tokens)) / window + HANDLING_S)
        self.average += (price - self.average) * (WEIGHT if self._observed else 1.0)
        self._observed = True
        level = self._level(self.average)
        if level < self.threshold and self._level(self.average * SLACK) >= self.threshold:
            return False
        changed, self.threshold = level != self.threshold, level
        return changed

    def _level(self, price: float) -> float:
        """The highest level that the price reaches; the lowest there is, if none."""
        if price > DEAR:
            return PAUSE
        return max((level for level in self._levels[:-1] if level <= price), default=self._levels[0])
