"""When the requests of a run are due.

A closed loop keeps a number of requests under way and sends the next when one ends: a slow server gets fewer. An open
loop has a schedule that nothing the server does can change, as users have.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

from slipstream.errors import InvalidArgument

Schedule = Callable[[int], list[float]]
"""From a number of requests to the seconds, after the run's start, at which each is due; ascending."""


def constant(rate: float) -> Schedule:
    """One request each 1 / `rate` seconds, the first at 0. Raises InvalidArgument for a rate that is not positive."""
    gap_s = _gap_s(rate)
    return lambda count: [index * gap_s for index in range(count)]


def poisson(rate: float, seed: int = 0) -> Schedule:
    """Independent arrivals: gaps are exponential with mean 1 / `rate` seconds. The same seed gives the same times, so
    that both runs of a pair meet the same bursts. Raises InvalidArgument for a rate that is not positive."""
    gap_s = _gap_s(rate)

    def times(count: int) -> list[float]:
        chance = random.Random(seed)
        return list(accumulate(chance.expovariate(1.0 / gap_s) for _ in range(count)))

    return times


def _gap_s(rate: float) -> float:
    if not rate > 0.0:
        raise InvalidArgument("a rate of requests is positive.", reason="BAD_RATE")
    return 1.0 / rate
