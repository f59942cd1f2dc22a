"""When a step should wait for candidates that are on their way. One function, one formula.

A step that starts now commits N tokens in expectation. If it first waits t seconds for candidates that arrive by then
and add G(t) tokens, it commits N + G(t), t seconds later. Whatever comes after comes t seconds later too, and a
verifier that commits R tokens a second in the long run commits R * t fewer in that time. So waiting pays iff

    G(t) > R * t,     and among the moments at which something arrives the best one maximises G(t) - R * t.

This is the renewal-reward argument: a policy whose long-run ratio of tokens to seconds is the largest possible, R,
takes in every state what maximises tokens - R * seconds (Dinkelbach, "On nonlinear fractional programming", 1967). To
compare (N + G) / (t + step) with N / step instead looks at one step alone. It waits too long after a miss, where N is
1: a plain step loses nothing there, for the candidates that it did not wait for are the next step's.

The decision is taken again at every arrival, so a chain that comes token by token is waited for exactly as long as each
next token pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """Candidates that may come on one session."""

    after_s: float
    """Seconds from now."""
    gain: float
    """Tokens that they add to the step in expectation: what they are worth times the chance that they come then."""


def wait_s(rate: float, arrivals: Iterable[Arrival], most_s: float) -> float:
    """Seconds to wait before a step, where `rate` tokens are committed a second; 0 is to start now."""
    best, best_profit = 0.0, 0.0
    gain = 0.0
    for arrival in sorted(arrivals, key=lambda arrival: arrival.after_s):
        if arrival.after_s > most_s:
            break
        gain += arrival.gain
        profit = gain - rate * arrival.after_s
        if profit > best_profit:
            best, best_profit = arrival.after_s, profit
    return best
