"""Metrics of requests and sessions, by their kind: the model and the request's workload."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from prometheus_client import Histogram

from gateway.requests.resolved_request import ResolvedRequest
from gateway.routing.drafters import pool_of
from gateway.sessions.observer import SessionObserver
from gateway.sessions.request_stats import MOST_DRAFTERS, RequestStats, RoundCounters
from gateway.telemetry.kept_traces import ExemplarTrace, rejected, remarkable
from slipstream.errors import UNSERVED, SlipstreamError
from slipstream.telemetry import metrics, spans
from slipstream.telemetry.metrics_collector import BoundedLabels
from slipstream.telemetry.tracing import Value
from slipstream.v1 import verifier_pb2

log = logging.getLogger(__name__)

MOST_MODELS, MOST_WORKLOADS, MOST_METHODS, MOST_REASONS = 16, 16, 16, 64
Exemplar = dict[str, str] | None
MEASURED_OUTCOMES = ("stop", "length")
"""Outcomes of sessions that ended by themselves: only their times are observed."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds that a good request keeps, in seconds; 0: no bound."""

    UNBOUND_S: ClassVar[float] = 10.0
    """Without bounds a request that took longer is late."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    slow_s: float = 0.0
    """A request that took longer is logged."""

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        return (not self.ttft_s or ttft_s <= self.ttft_s) and (not self.tpot_s or tpot_s <= self.tpot_s)

    def late(self, ttft_s: float, tpot_s: float, e2e_s: float) -> bool:
        """Whether a request is worth a look for its times alone. Where there is a bound, a long text is not."""
        bound = self.ttft_s or self.tpot_s
        return not self.met(ttft_s, tpot_s) if bound else e2e_s >= self.UNBOUND_S


@dataclass(slots=True, eq=False)
class RequestSeries:
    """The numbers of all sessions of one kind."""

    ttft: tuple[Histogram, ...]
    """Ours and OpenTelemetry's, as are `tpot` and `e2e`."""
    tpot: tuple[Histogram, ...]
    e2e: tuple[Histogram, ...]
    gap: Histogram
    sessions: int = 0
    """Sessions running now."""
    waiting: int = 0
    """Those of them that wait for a verifier."""
    prompt_tokens: int = 0
    sums: RoundCounters = field(default_factory=RoundCounters)
    outcomes: Counter[str] = field(default_factory=Counter)
    lossy: int = 0
    """Sessions so far under a lossy acceptance rule."""
    good: int = 0
    good_tokens: int = 0

    def observe_times(self, stats: RequestStats, objectives: Objectives, exemplar: Exemplar) -> None:
        """A session ended by itself."""
        tpot_s = stats.tpot_s
        if tpot_s is not None:
            observe(self.tpot, tpot_s, exemplar)
        observe(self.e2e, stats.e2e_s, exemplar)
        if objectives.met(stats.ttft_s, tpot_s or 0.0):
            self.good += 1
            self.good_tokens += stats.sums.emitted


def observe(histograms: tuple[Histogram, ...], seconds: float, exemplar: Exemplar) -> None:
    for each in histograms:
        each.observe(seconds, exemplar)


class RequestMetrics:
    def __init__(self, objectives: Objectives | None = None, workloads: tuple[str, ...] = ()) -> None:
        """`workloads`: those that have numbers of their own; with none, the first that come have."""
        self.objectives = objectives or Objectives()
        self.ttft, self.tpot = metrics.TTFT.histogram(), metrics.TPOT.histogram()
        self.gap, self.e2e = metrics.GAP.histogram(), metrics.E2E.histogram()
        self.gen_ai_ttft, self.gen_ai_tpot = metrics.GEN_AI_TTFT.histogram(), metrics.GEN_AI_TPOT.histogram()
        self.gen_ai_e2e = metrics.GEN_AI_E2E.histogram()
        self.series: dict[tuple[str, ...], RequestSeries] = {}
        """By (model, workload)."""
        self.refused = 0
        self.rehomings = 0
        self.arithmetic_changes = 0
        """Times that a text went on with another arithmetic than wrote it so far."""
        self.failures: Counter[tuple[str, ...]] = Counter()
        """Failures of drafters, by (name, reason)."""
        self.methods = BoundedLabels(MOST_METHODS)
        """Methods that drafters report."""
        self._models, self._workloads = BoundedLabels(MOST_MODELS), BoundedLabels(MOST_WORKLOADS, workloads)
        self._arithmetics = BoundedLabels(MOST_MODELS)
        self._drafters, self._reasons = BoundedLabels(MOST_DRAFTERS), BoundedLabels(MOST_REASONS)

    @property
    def sessions(self) -> int:
        """Sessions running now."""
        return sum(each.sessions for each in self.series.values())

    @property
    def waiting(self) -> int:
        """Sessions that wait for a verifier."""
        return sum(each.waiting for each in self.series.values())

    def model_label(self, model: str) -> str:
        return self._models(model)

    def arithmetic_label(self, arithmetic: str) -> str:
        return self._arithmetics(arithmetic)

    def series_of(self, resolved: ResolvedRequest) -> RequestSeries:
        labels = self.model_label(resolved.model.name), self._workloads(resolved.workload)
        series = self.series.get(labels)
        if series is None:
            gen_ai = spans.TEXT_COMPLETION, spans.PROVIDER_NAME, labels[0]
            series = self.series[labels] = RequestSeries(
                ttft=(self.ttft.labels(*labels), self.gen_ai_ttft.labels(*gen_ai)),
                tpot=(self.tpot.labels(*labels), self.gen_ai_tpot.labels(*gen_ai)),
                e2e=(self.e2e.labels(*labels), self.gen_ai_e2e.labels(*gen_ai)),
                gap=self.gap.labels(*labels),
            )
        return series

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Counts a request that is refused inside."""
        try:
            yield
        except SlipstreamError as error:
            if error.code in UNSERVED and not error.reason.startswith("KEY_"):
                self.refused += 1
            raise

    def drafter_failed(self, drafter: str, reason: str, sessions: int) -> None:
        self.failures[self._drafters(pool_of(drafter)), self._reasons(reason)] += sessions


class SessionMetrics(SessionObserver):
    """Counts one session into the series of its kind."""

    def __init__(
        self,
        metrics: RequestMetrics,
        resolved: ResolvedRequest,
        stats: RequestStats,
        *,
        from_beginning: bool = True,
        exemplar: ExemplarTrace | None = None,
    ) -> None:
        """`from_beginning`: the session's prompt was not counted before. `exemplar`: the trace of its request."""
        self._metrics = metrics
        self._exemplar = exemplar
        self._prompt_tokens = stats.prompt_tokens if from_beginning else 0
        self._series = metrics.series_of(resolved)
        self._stats = stats
        self._last_token_at: float | None = None

    def run_began(self) -> None:
        self._series.sessions += 1
        self._series.prompt_tokens += self._prompt_tokens
        self._series.lossy += self._stats.lossy

    def verifier_wait_began(self) -> None:
        self._series.waiting += 1

    def verifier_wait_ended(self) -> None:
        self._series.waiting -= 1

    def reopening(self) -> None:
        self._metrics.rehomings += 1

    def arithmetic_changed(self, before: str, after: str, length: int) -> None:
        self._metrics.arithmetic_changes += 1

    def round_shown(self, done: verifier_pb2.Round) -> None:
        stats = self._stats
        if done.token_ids:
            if self._last_token_at is None:
                late = self._metrics.objectives.late(stats.ttft_s, 0.0, stats.ttft_s)
                observe(self._series.ttft, stats.ttft_s, self._labels(late, {}))
            else:
                self._series.gap.observe(stats.last_token_at - self._last_token_at)
            self._last_token_at = stats.last_token_at
        self._series.sums.add_round(done, speculates=stats.speculates)

    def run_ended(self, outcome: str) -> None:
        self._series.sessions -= 1
        self._series.outcomes[outcome] += 1
        if outcome in MEASURED_OUTCOMES:
            stats, objectives = self._stats, self._metrics.objectives
            late = objectives.late(stats.ttft_s, stats.tpot_s or 0.0, stats.e2e_s)
            exemplar = self._labels(late, rejected(stats.sums.drafted, stats.sums.accepted))
            self._series.observe_times(stats, objectives, exemplar)
        slow_s = self._metrics.objectives.slow_s
        if slow_s and self._stats.e2e_s > slow_s:
            log.warning("slow request", extra=_in_numbers(outcome, self._stats))

    def _labels(self, late: bool, candidates: Mapping[str, Value]) -> Exemplar:
        """The exemplar of an observation, by what is known of the request so far."""
        if self._exemplar is None:
            return None
        known = {spans.LATE: late, spans.REHOMED: self._stats.rehomed, **candidates}
        return self._exemplar.labels(remarkable=remarkable(known, failed=False))


def _in_numbers(outcome: str, stats: RequestStats) -> dict[str, object]:
    sums = stats.sums
    return {
        "outcome": outcome,
        "ttft_s": round(stats.ttft_s, 3),
        "e2e_s": round(stats.e2e_s, 3),
        "tokens": sums.emitted,
        "rounds": sums.rounds,
        "drafted": sums.drafted,
        "accepted": sums.accepted,
        "bubble_s": round(sums.bubble_us / 1e6, 3),
        "rehomed": stats.rehomed,
    }
