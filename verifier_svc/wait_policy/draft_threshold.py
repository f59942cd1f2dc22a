"""What a candidate costs, and from it what drafters are told: how likely a path must be for it to be sent at all.

One more token in a step of n costs t(n + 1) - t(n) seconds, and before that some microseconds of the verifier's own
thread, h, to be read, grafted, weighed and dropped; in that time the verifier would commit R tokens a second. So a
candidate pays for its place in a step iff it is accepted with a probability above

    price = R * (dt/dn + h),

the marginal form of what `budget` decides node by node, and h, which is spent before that.

Drafters are told less than that. A candidate that is too unlikely for this step may be what the next one begins with:
a commit divides every path probability by that of what was committed. Being there then is worth the part of a token
that it brings above its price, about SAVED * (1 - price), and until then it cost h alone. And it is taken then only if
it is worth the price itself, below something that was worth it too. So it is worth sending above

    max(R * h / (SAVED * (1 - price)), price^2),

and where no candidate pays (a busy verifier whose passes take time in proportion to their tokens: the price is 1)
drafters stop altogether, so that speculation that is off costs nothing anywhere. None of this needs candidates to be
known, so they start again by themselves when the load falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEVELS = (0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6)
"""Path probabilities that drafters are told; below the lowest, bytes on the wire are dearer than what is gained."""
PAUSE = 1.0
"""Instead of a level: no candidate pays."""
DEAR = 0.8
"""Above this price nothing pays: hardly any first candidate is surer."""
HANDLING_S = 25e-6
"""h, measured (`python -m benchmarks.limit`: CPU of a round with and without speculation, by candidates that came)."""
SAVED = 0.5
"""Tokens that a step gains by a candidate which is there when the step begins."""
WEIGHT = 0.25
"""Of a new price in the average: a handful of steps after many sessions came, nobody drafts in vain any more."""
SLACK = 1.25
"""A price must have fallen below a level by so much before drafters are told a lower one: talk costs too."""


class DraftThreshold:
    """Smoothed, and in steps."""

    def __init__(self, floor: float = LEVELS[0]) -> None:
        self._levels = above(floor)
        self.price = 0.0
        """In tokens; what one more candidate costs the step that takes it."""
        self._sending = 0.0
        """Path probability above which a candidate is worth sending."""
        self._observed = False
        self._dear = 0.0
        self.threshold = self._levels[0]
        """Path probability that a candidate must have; PAUSE: none is wanted."""

    def observe(self, rate: float, seconds: Callable[[int], float], tokens: int) -> bool:
        """A step of so many tokens, where `rate` tokens are committed a second. Whether the threshold changed."""
        window = max(4, tokens // 8)  # the curve is linear between buckets: a wider look evens its corners out
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
    """The highest of the ascending `levels` that the price reaches, the lowest if none; but the present one until the
    price is clearly below it."""
    reached = _highest(price, levels)
    return present if reached < present <= _highest(price * SLACK, levels) else reached


def above(floor: float) -> list[float]:
    """The levels from `floor` on."""
    return [floor, *(level for level in LEVELS if level > floor)]


def _highest(price: float, levels: Sequence[float]) -> float:
    return max((level for level in levels if level <= price), default=levels[0])
