"""Estimates over sessions, with confidence intervals. The sampling unit is the session: rounds of one session are
correlated and do not count as independent.

- A **ratio** is the sum of one number over the sum of another, over sessions (a mean: over ones). Its variance is that
  of each session's influence, (n_i - r d_i) / mean(d): the delta method, clustered by session. Intervals use
  Student's t, of two samples with Welch's degrees of freedom.
- A **quantile** is an order statistic, and its interval lies between two others that the true quantile is between with
  at least the wanted probability, whatever the distribution (David and Nagaraja, "Order Statistics", 7.1).
- The **difference** of two quantiles has the interval that theirs give (Zou and Donner, Statistics in Medicine 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
CONFIDENCE = 0.95
LEAST = 10
"""Sessions below which a ratio has no interval."""


class Interval(NamedTuple):
    """An estimate with the bounds of its confidence interval; bounds are infinite if unknown, the value is NaN if there
    is none."""

    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


class Ratio(NamedTuple):
    value: float
    moves: Numbers
    """Influence of each session on the value, times the number of sessions."""

    @property
    def variance(self) -> float:
        """Variance of the estimate; infinite for too few sessions."""
        return float(self.moves.var(ddof=1)) / len(self.moves) if len(self.moves) >= LEAST else math.inf


NOTHING = Interval(math.nan)


def ratio(numerators: Numbers, denominators: Numbers) -> Ratio:
    """Sum of numerators over sum of denominators; NaN where the denominators are all zero."""
    total = float(denominators.sum())
    if total <= 0.0:
        return Ratio(math.nan, np.empty(0))
    value = float(numerators.sum()) / total
    return Ratio(value, (numerators - value * denominators) * (len(denominators) / total))


def mean(values: Numbers) -> Ratio:
    return ratio(values, np.ones_like(values))


def of_ratio(one: Ratio, confidence: float = CONFIDENCE) -> Interval:
    return _around(one.value, one.variance, len(one.moves) - 1, confidence)


def apart(first: Ratio, second: Ratio, confidence: float = CONFIDENCE) -> Interval:
    """The second minus the first, of independent sessions."""
    one, two = first.variance, second.variance
    freedom = math.inf
    if 0.0 < one + two < math.inf:
        freedom = (one + two) ** 2 / (one**2 / (len(first.moves) - 1) + two**2 / (len(second.moves) - 1))
    return _around(second.value - first.value, one + two, freedom, confidence)


def paired(first: Ratio, second: Ratio, confidence: float = CONFIDENCE) -> Interval:
    """The second minus the first, of the same sessions in the same order."""
    if len(first.moves) != len(second.moves):  # one of them has no value
        return NOTHING
    both = Ratio(second.value - first.value, second.moves - first.moves)
    return of_ratio(both, confidence)


def quantile(values: Sequence[float] | Numbers, share: float, confidence: float = CONFIDENCE) -> Interval:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    size = len(ordered)
    if not size:
        return NOTHING
    below = np.cumsum(_binomial(size, share))  # [k]: that at most k values lie below the true quantile
    tail = (1.0 - confidence) / 2.0
    low = int(np.searchsorted(below, tail, side="right"))  # values that surely enough lie below
    high = int(np.searchsorted(below, 1.0 - tail, side="left")) + 1
    return Interval(
        float(ordered[max(0, math.ceil(share * size) - 1)]),
        float(ordered[low - 1]) if low else -math.inf,
        float(ordered[high - 1]) if high <= size else math.inf,
    )


def between(first: Interval, second: Interval) -> Interval:
    """The second minus the first, from intervals of two independent samples."""
    value = second.value - first.value
    if not (first.known and second.known):
        return Interval(value)
    down = math.hypot(second.value - second.low, first.high - first.value)
    up = math.hypot(second.high - second.value, first.value - first.low)
    return Interval(value, value - down, value + up)


def student(freedom: float, confidence: float) -> float:
    """Student's t between whose minus and plus the share `confidence` lies (Abramowitz and Stegun 26.7.5): within 0.1 %
    from 8 degrees of freedom on."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    terms = (
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0,
        (79.0 * z**9 + 776.0 * z**7 + 1482.0 * z**5 - 1920.0 * z**3 - 945.0 * z) / 92160.0,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _around(value: float, variance: float, freedom: float, confidence: float) -> Interval:
    if not math.isfinite(variance) or math.isnan(value):
        return Interval(value)
    half = student(freedom, confidence) * math.sqrt(variance)
    return Interval(value, value - half, value + half)


def _binomial(size: int, share: float) -> Numbers:
    """Binomial probabilities of 0 .. size."""
    counts = np.arange(1, size + 1)
    ways = np.concatenate(([0.0], np.cumsum(np.log(size - counts + 1) - np.log(counts))))
    k = np.arange(size + 1)
    probabilities: Numbers = np.exp(ways + k * math.log(share) + (size - k) * math.log1p(-share))
    return probabilities
