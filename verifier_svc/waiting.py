"""When a step should wait for candidates that are on their way. One function, one formula.

A step that starts now commits N tokens in expectation and takes t_v seconds. If it first waits t seconds for candidates
that arrive by then and add G(t) tokens, it commits N + G(t) in t + t_v. Waiting pays iff

    (N + G(t)) / (t + t_v)  >  N / t_v,     that is     G(t) * t_v  >  N * t,

and among the moments at which something arrives the best one maximises the left-hand side. The decision is taken again
at every arrival, so a chain that comes token by token is waited for exactly as long as each next token pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """Candidates expected on one session."""

    after_s: float
    """Seconds from now; 0 when overdue but still believed in."""
    gain: float
    """Tokens that they add to the step in expectation."""


def wait_s(tokens: float, step_s: float, arrivals: Iterable[Arrival], most_s: float) -> float:
    """Seconds to wait before a step that would commit `tokens` in expectation and takes `step_s`; 0 is to start now."""
    best, best_rate = 0.0, tokens / max(step_s, 1e-9)
    gain = 0.0
    for arrival in sorted(arrivals, key=lambda arrival: arrival.after_s):
        if arrival.after_s > most_s:
            break
        gain += arrival.gain
        rate = (tokens + gain) / max(arrival.after_s + step_s, 1e-9)
        if rate > best_rate:
            best, best_rate = arrival.after_s, rate
    return best
