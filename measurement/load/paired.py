"""Effect of one change, from runs in pairs: each pair gives a ratio, and their logarithms an interval.

Ratios of neighbouring runs cancel what drifts on a shared machine; their geometric mean treats twice as fast and half
as fast alike. Few pairs need Student's t with its heavy tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The geometric mean of the pairs' ratios and its confidence interval; no bounds for a single pair."""

    value: float
    low: float | None
    high: float | None
    pairs: int


def paired_ratio(before: Sequence[float], after: Sequence[float]) -> PairedRatio | None:
    """By how much `after` is larger, pair by pair; None unless every value is positive and there is a pair."""
    if not before or min(*before, *after) <= 0.0:
        return None
    logs = [math.log(new / old) for old, new in zip(before, after, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return PairedRatio(math.exp(middle), None, None, len(logs))
    half = student(len(logs) - 1, CONFIDENCE) * statistics.stdev(logs) / math.sqrt(len(logs))
    return PairedRatio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(logs))


def student(freedom: int, confidence: float) -> float:
    """Student's t between whose minus and plus the share `confidence` lies; exact for whole degrees of freedom."""
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        low, high = high, 2.0 * high
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """The probability of -t .. t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    if freedom % 2 == 0:
        for k in range(0, freedom, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        return math.sin(angle) * total
    term = cosine
    for k in range(1, freedom, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2.0 / math.pi * (angle + math.sin(angle) * total)
