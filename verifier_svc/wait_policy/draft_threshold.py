"""Computes the price of a candidate, and from it the path probability that drafters send candidates above.

One more token in a step of n costs t(n + 1) - t(n) seconds, and before that some microseconds of the verifier's own
thread, h, to be read, grafted, compared and dropped; in that time the verifier would commit R tokens a second. So a
candidate pays for its place in a step iff it is accepted with a probability above

    price = R * (dt/dn + h),

the marginal form of what `budget` decides node by node, and h, which is spent before that.

Drafters are sent a lower threshold. A candidate that is too unlikely for this step may be near the root of the next
one: a commit divides every path probability by that of the committed path. A candidate that is there by then saves the
part of a token above its price, about SAVED * (1 - price), and has cost h alone. It is then taken only if it is worth
the price itself, below a node that was worth it too. So it is worth sending above

    max(R * h / (SAVED * (1 - price)), price^2),

and where no candidate pays (a busy verifier whose passes take time in proportion to their tokens: the price is 1)
drafters stop altogether, so that speculation that is off costs nothing anywhere. The threshold does not depend on
candidates, so drafters start again when the load falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEVELS = (0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8)
"""Thresholds that drafters are sent. Below the lowest, bytes on the wire cost more than a candidate gains."""
PAUSE = 1.0
"""Threshold at which drafters stop: no candidate pays."""
DEAR = 0.9
"""Price in tokens above which no candidate pays: hardly any first candidate is likelier."""
HANDLING_S = 25e-6
"""h, measured (`python -m benchmarks.limit`: CPU of a round with and without speculation, by candidates that came)."""
SAVED = 0.5
"""Tokens that a step gains by a candidate which is there when the step begins."""
WEIGHT = 0.25
"""Weight of a new price in the average: after a burst of sessions, drafters stop within a handful of steps."""
SLACK = 1.25
"""Factor by which the price must fall below a level before drafters are sent a lower one: updates cost too."""


class DraftThreshold:
    def __init__(self, floor: float = LEVELS[0]) -> None:
        self._levels = [floor, *(level for level in LEVELS if level > floor)]
        self.price = 0.0
        """Tokens that one more candidate costs the step that takes it."""
        self._sending = 0.0
        """Path probability above which a candidate is worth sending."""
        self._observed = False
        self._dear = 0.0
        self.threshold = self._levels[0]
        """Path probability that a candidate must have; PAUSE when none is wanted."""

    def observe(self, rate: float, seconds: Callable[[int], float], tokens: int) -> bool:
        """Records a step of `tokens` tokens while `rate` tokens are committed a second. `seconds` gives the duration of
        a step of so many tokens. Returns whether the threshold changed."""
        window = max(4, tokens // 8)  # the curve is linear between buckets: a wider difference smooths its corners
        price = min(PAUSE, rate * ((seconds(tokens + window) - seconds(tokens)) / window + HANDLING_S))
        weight = WEIGHT if self._observed else 1.0
        self.price += (price - self.price) * weight
        sending = max(rate * HANDLING_S / (SAVED * (1.0 - min(self.price, DEAR))), self.price**2)
        self._sending += (sending - self._sending) * weight
        self._observed = True
        before = self.threshold
        self._dear = level(self.price, self._dear, (0.0, DEAR))
        sent = level(self._sending, before, self._levels)
        self.threshold = PAUSE if self._dear else sent
        return self.threshold != before


def level(price: float, present: float, levels: Sequence[float]) -> float:
    """The highest of the ascending `levels` that the price reaches, the lowest if none; `present` until the price is
    below it by SLACK."""
    reached = _highest(price, levels)
    return present if reached < present <= _highest(price * SLACK, levels) else reached


def _highest(price: float, levels: Sequence[float]) -> float:
    return max((level for level in levels if level <= price), default=levels[0])
