"""Percentiles of a run's latencies, and its goodput: the requests each second that met every objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from measurement.load.runner import RequestOutcome, Run

LATENCIES = ("ttft", "tpot", "itl", "e2e")
SHARES = (0.5, 0.9, 0.95, 0.99)
Figures = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """Most milliseconds of each latency of a request; None sets no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> dict[str, float]:
        bounds = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def met(self, outcome: RequestOutcome) -> bool:
        """A request that failed or had no output meets none; one of a single token meets any TPOT."""
        if outcome.error is not None or not outcome.heard_s:
            return False
        return all((of(outcome, name) or [0.0])[0] <= bound / 1e3 for name, bound in self.given.items())


def of(outcome: RequestOutcome, latency: str) -> list[float]:
    """One latency of a request in seconds: no value, one, or, for `itl`, several."""
    if latency == "itl":
        return outcome.itl_s
    value: float | None = getattr(outcome, f"{latency}_s")
    return [] if value is None else [value]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    # A share such as 0.95 of 20 values is a little more than 19 in binary: without the rounding, the 20th.
    rank = math.ceil(round(share * len(values), 9))
    return sorted(values)[max(1, rank) - 1]


def seconds(outcomes: Sequence[RequestOutcome], latency: str) -> list[float]:
    """All values of a latency over the requests that were served."""
    return [value for outcome in outcomes if outcome.error is None for value in of(outcome, latency)]


def figures(run: Run, objectives: LatencyObjectives | None = None) -> Figures:
    """Counts, rates and percentiles of a run; None where nothing was measured. Latencies in milliseconds."""
    objectives = objectives or LatencyObjectives()
    answers = [outcome.answered for outcome in run.served]
    tokens, rounds, drafted, accepted, with_drafts = (
        sum(getattr(answer, name) for answer in answers)
        for name in ("tokens", "rounds", "drafted", "accepted", "rounds_with_drafts")
    )
    found: Figures = {
        "requests": len(run.outcomes),
        "failed": len(run.outcomes) - len(answers),
        "tokens": tokens,
        "wall_s": run.wall_s,
        "requests_per_s": len(answers) / run.wall_s,
        "tokens_per_s": run.tokens_per_s,
        "tokens_per_round": tokens / rounds if rounds else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / with_drafts if with_drafts else None,
        "sent_late_max_ms": 1e3 * max((each.sent_s - each.due_s for each in run.outcomes), default=0.0),
    }
    if objectives.given:
        good = sum(map(objectives.met, run.outcomes))
        found |= {"goodput_per_s": good / run.wall_s, "good_share": good / len(run.outcomes)}
    for latency in LATENCIES:
        found |= spread(seconds(run.outcomes, latency), latency)
    return found


def spread(values: Sequence[float], latency: str) -> Figures:
    """Mean and percentiles in milliseconds of values in seconds."""
    mean = 1e3 * math.fsum(values) / len(values) if values else None
    return {f"{latency}_mean_ms": mean} | {
        f"{latency}_p{100 * share:g}_ms": 1e3 * percentile(values, share) if values else None for share in SHARES
    }
