"""Computes when a step should wait for candidates that are on their way: one function, one formula.

A step that starts now commits N tokens in expectation. If it is held back until t, or until all that is awaited has
come, it commits G(t) more and starts D(t) seconds later, both in expectation. With F_i(u) the probability that answer i
has come by u, and g_i what it is worth,

    G(t) = sum of g_i * F_i(t),     D(t) = integral from 0 to t of 1 - product of F_i(u) du.

All later steps start D later too, and a verifier that commits R tokens a second in the long run commits R * D fewer in
that time. So waiting pays iff G(t) > R * D(t) for some t, and the best t has the largest difference.

This is the renewal-reward argument: a policy whose long-run ratio of tokens to seconds is the largest possible, R,
takes in every state what maximises tokens - R * seconds (Dinkelbach, "On nonlinear fractional programming", 1967). To
compare (N + G) / (t + step) with N / step instead looks at one step alone. It waits too long after a miss, where N is
1: a plain step loses nothing there, for the candidates that it did not wait for are the next step's.

The decision is taken again at every arrival, so a chain that comes token by token is waited for exactly as long as each
next token pays, and what is late is judged by its chances among the late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Awaited:
    """Answers that may come, equal in their chances and independent of each other."""

    gain: float
    """Tokens that they add to the step when all have come."""
    chances: Sequence[tuple[float, float]]
    """(seconds from now, probability that one comes then): at most 1 in all."""
    count: int = 1


def wait_s(rate: float, awaited: Sequence[Awaited], most_s: float, timer_s: float = 0.0) -> float:
    """Seconds to wait before a step, where `rate` tokens are committed a second; 0 is to start now.

    A wait in vain ends with a timer, which the event loop rounds up to whole `timer_s`.
    """
    moments = sorted(
        (after_s, index, chance)
        for index, each in enumerate(awaited)
        for after_s, chance in each.chances
        if after_s <= most_s
    )
    come = [0.0] * len(awaited)
    none_yet, logarithm = len(awaited), 0.0  # of the product of what has come; answers of which none can have yet
    best, best_profit = 0.0, 0.0
    now = gain = delay = 0.0
    waiting = 1.0  # probability that not all have come
    for after_s, index, chance in moments:
        delay += (after_s - now) * waiting
        now = after_s
        each, before = awaited[index], come[index]
        come[index] += chance
        none_yet -= before == 0.0
        logarithm += each.count * (math.log(come[index]) - (math.log(before) if before else 0.0))
        waiting = 1.0 if none_yet else max(0.0, 1.0 - math.exp(logarithm))
        gain += each.gain * chance
        overtime = math.ceil(after_s / timer_s) * timer_s - after_s if timer_s else 0.0
        profit = gain - rate * (delay + waiting * overtime)
        if profit > best_profit:
            best, best_profit = after_s, profit
    return best
