"""What a gateway counts of its sessions, by their kind: the model, and the workload that the request names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import Histogram

from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.drafters import pool_of
from gateway.telemetry.round_counters import MOST_DRAFTERS, RoundCounters
from slipstream.errors import UNSERVED, Aborted, Internal, SlipstreamError
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import BoundedLabels
from slipstream.telemetry.tracing import exemplar

if TYPE_CHECKING:
    from gateway.telemetry.request_stats import RequestStats

log = logging.getLogger(__name__)

MOST_MODELS, MOST_WORKLOADS, MOST_METHODS, MOST_REASONS = 16, 16, 16, 64
WELL = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    slow_s: float = 0.0
    """A request that took so long is told of in the log."""

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        return (not self.ttft_s or ttft_s <= self.ttft_s) and (not self.tpot_s or tpot_s <= self.tpot_s)


@dataclass(slots=True, eq=False)
class RequestSeries:
    """Of all sessions of one kind."""

    ttft: Histogram
    tpot: Histogram
    gap: Histogram
    e2e: Histogram
    sums: RoundCounters = field(default_factory=RoundCounters)
    outcomes: Counter[str] = field(default_factory=Counter)
    good: int = 0
    good_tokens: int = 0

    def began(self, ttft_s: float) -> None:
        self.ttft.observe(ttft_s, exemplar())

    def ended_well(self, ledger: RequestStats, objectives: Objectives) -> None:
        tpot_s = ledger.tpot_s
        if tpot_s is not None:
            self.tpot.observe(tpot_s, exemplar())
        self.e2e.observe(ledger.e2e_s, exemplar())
        if objectives.met(ledger.ttft_s, tpot_s or 0.0):
            self.good += 1
            self.good_tokens += ledger.sums.emitted


class RequestMetrics:
    """`workloads`: those that have numbers of their own; none: the first that come."""

    def __init__(self, objectives: Objectives | None = None, workloads: tuple[str, ...] = ()) -> None:
        self.objectives = objectives or Objectives()
        self.ttft, self.tpot = metrics.TTFT.histogram(), metrics.TPOT.histogram()
        self.gap, self.e2e = metrics.GAP.histogram(), metrics.E2E.histogram()
        self.series: dict[tuple[str, ...], RequestSeries] = {}
        """By the labels REQUEST."""
        self.refused = 0
        self.sessions = self.waiting = self.rehomings = 0
        self.failures: Counter[tuple[str, ...]] = Counter()
        """Of drafters, by name and reason."""
        self.methods = BoundedLabels(MOST_METHODS)
        """That drafters say they have."""
        self._models, self._workloads = BoundedLabels(MOST_MODELS), BoundedLabels(MOST_WORKLOADS, workloads)
        self._drafters, self._reasons = BoundedLabels(MOST_DRAFTERS), BoundedLabels(MOST_REASONS)

    def of(self, plan: ResolvedRequest) -> RequestSeries:
        labels = self._models(plan.model.name), self._workloads(plan.workload)
        known = self.series.get(labels)
        if known is None:
            ttft, tpot, gap, e2e = (each.labels(*labels) for each in (self.ttft, self.tpot, self.gap, self.e2e))
            known = self.series[labels] = RequestSeries(ttft, tpot, gap, e2e)
        return known

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Around what may refuse a request."""
        try:
            yield
        except SlipstreamError as error:
            if error.code in UNSERVED and not error.reason.startswith("KEY_"):
                self.refused += 1
            raise

    @contextmanager
    def placing(self) -> Iterator[None]:
        """While a session waits for a verifier."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def drafter_failed(self, drafter: str, reason: str, sessions: int) -> None:
        self.failures[self._drafters(pool_of(drafter)), self._reasons(reason)] += sessions

    def ended(self, outcome: str, ledger: RequestStats) -> None:
        """The session is over, or let go; its ledger is closed if it ended well."""
        if ledger.series is None:
            return
        ledger.series.outcomes[outcome] += 1
        if outcome in WELL:
            ledger.series.ended_well(ledger, self.objectives)
        slow_s = self.objectives.slow_s
        if slow_s and ledger.e2e_s > slow_s:
            log.warning("slow request", extra=_told(outcome, ledger))


def outcome_of(error: SlipstreamError) -> str:
    """Of a session that was ended by it."""
    if isinstance(error, Internal):
        return "failed"
    if isinstance(error, Aborted):  # rolled back or taken over, as some client wanted it
        return "fenced"
    return "unavailable" if error.code in UNSERVED else "invalid"


def _told(outcome: str, ledger: RequestStats) -> dict[str, object]:
    sums = ledger.sums
    return {
        "outcome": outcome,
        "ttft_s": round(ledger.ttft_s, 3),
        "e2e_s": round(ledger.e2e_s, 3),
        "tokens": sums.emitted,
        "rounds": sums.rounds,
        "drafted": sums.drafted,
        "accepted": sums.accepted,
        "bubble_s": round(sums.bubble_us / 1e6, 3),
        "rehomed": ledger.rehomed,
    }
