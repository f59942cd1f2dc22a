"""Where a gateway's metrics come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.routing.breaker import BreakerState
from gateway.routing.router import Router
from gateway.store.measured import MeasuredStore
from gateway.store.session_log import WriteBehindQueue
from gateway.telemetry.request_metrics import RequestMetrics, RequestSeries
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, Source, Values, spans_of
from slipstream.telemetry.tracing import Tracing

STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
ENGINE = "0"
"""vLLM numbers its engines; a gateway is one."""
US = 1e-6


@dataclass(frozen=True, slots=True)
class MetricsParts:
    """Of a gateway, that know numbers."""

    config: GatewayConfig
    meters: RequestMetrics
    router: Router
    store: MeasuredStore
    scribe: WriteBehindQueue | None
    traffic: ByteCounter
    server: Server
    tracing: Tracing | None = None


def meter(parts: MetricsParts) -> MetricsCollector:
    sources = {**_rounds(parts.meters), **_requests(parts), **_workers(parts), **_store(parts), **_vllm(parts.meters)}
    sources[metrics.CANDIDATES_VERIFIED] = lambda: _shares(parts, "drafted")
    sources[metrics.CANDIDATES_ACCEPTED] = lambda: _shares(parts, "accepted")
    sources[metrics.CANDIDATE_ROUNDS] = lambda: _shares(parts, "rounds")
    sources[metrics.RPC_ERRORS] = lambda: parts.server.errors
    sources[metrics.SPANS] = spans_of(parts.tracing)
    return MetricsCollector("gateway", sources)


def _rounds(meters: RequestMetrics) -> dict[metrics.Metric, Source]:
    def each(number: Callable[[RequestSeries], float]) -> Callable[[], Values]:
        return lambda: {labels: number(series) for labels, series in meters.series.items()}

    def misses() -> Values:
        return {
            (*labels, cause): count
            for labels, series in meters.series.items()
            for cause, count in series.sums.misses.items()
        }

    def depths() -> Values:
        return {
            (*labels, str(depth)): count
            for labels, series in meters.series.items()
            for depth, count in series.sums.reached()
        }

    return {
        metrics.ROUNDS: each(lambda series: series.sums.rounds),
        metrics.ROUNDS_WITH_DRAFTS: each(lambda series: series.sums.rounds_with_drafts),
        metrics.DRAFTED: each(lambda series: series.sums.drafted),
        metrics.ACCEPTED: each(lambda series: series.sums.accepted),
        metrics.EMITTED: each(lambda series: series.sums.emitted),
        metrics.ACCEPTED_BY_DEPTH: depths,
        metrics.HITS: each(lambda series: series.sums.hits),
        metrics.MISSES: misses,
        metrics.ROUND_WAIT: each(lambda series: US * series.sums.wait_us),
        metrics.ROUND_BUBBLE: each(lambda series: US * series.sums.bubble_us),
        metrics.ROUND_VERIFY: each(lambda series: US * series.sums.verify_us),
        metrics.GOOD_REQUESTS: each(lambda series: series.good),
        metrics.GOOD_TOKENS: each(lambda series: series.good_tokens),
        metrics.TTFT: meters.ttft,
        metrics.TPOT: meters.tpot,
        metrics.GAP: meters.gap,
        metrics.E2E: meters.e2e,
    }


def _shares(parts: MetricsParts, field: str) -> Values:
    named = parts.meters.methods
    methods = {drafter.pool: named(drafter.method) for drafter in parts.router.drafters if drafter.method}
    return {
        (model, name, methods.get(name, ""), workload): getattr(share, field)
        for (model, workload), series in parts.meters.series.items()
        for name, share in series.sums.shares.items()
    }


def _requests(parts: MetricsParts) -> dict[metrics.Metric, Source]:
    meters, objectives = parts.meters, parts.meters.objectives

    def outcomes() -> Values:
        counts = {
            (*labels, outcome): count
            for labels, series in meters.series.items()
            for outcome, count in series.outcomes.items()
        }
        return counts | {("", "", "refused"): meters.refused}

    return {
        metrics.REQUESTS: outcomes,
        metrics.OBJECTIVE: lambda: {("ttft",): objectives.ttft_s, ("tpot",): objectives.tpot_s},
        metrics.GATEWAY_SESSIONS: lambda: meters.sessions,
        metrics.GATEWAY_WAITING: lambda: meters.waiting,
        metrics.REHOMINGS: lambda: meters.rehomings,
    }


def _workers(parts: MetricsParts) -> dict[metrics.Metric, Source]:
    router, prices = parts.router, parts.config.prices_of_drafters()

    def present() -> Values:
        """Of every name in the configuration, whoever is found behind it: nobody is a number too."""
        workers: dict[tuple[str, ...], float] = {("verifier", target): 0 for target in parts.config.verifiers}
        workers |= {("drafter", pool): 0 for pool in router.pools}
        for verifier in router.verifiers:
            workers["verifier", router.target_of(verifier)] += verifier.present
        for drafter in router.drafters:
            workers["drafter", drafter.pool] += drafter.present
        return workers

    def cost() -> Values:
        verifiers = sum(verifier.present for verifier in router.verifiers)
        drafters = sum(prices.get(drafter.pool, 0.0) for drafter in router.drafters if drafter.present)
        return {("verifier",): verifiers * parts.config.verifier_price, ("drafter",): drafters}

    def breakers() -> Values:
        now = router.clock()
        states = sorted((STATES[drafter.breaker.state(now)], drafter.pool) for drafter in router.drafters)
        return {(name,): state for state, name in states}  # of one name the worst

    return {
        metrics.WORKERS: present,
        metrics.COST: cost,
        metrics.BREAKER: breakers,
        metrics.DRAFTER_FAILURES: lambda: parts.meters.failures,
        metrics.LINK_BYTES: lambda: parts.traffic.by_label("verifier"),
    }


def _store(parts: MetricsParts) -> dict[metrics.Metric, Source]:
    def lag() -> float:
        return max(parts.store.lag_s, 0.0 if parts.scribe is None else parts.scribe.lag_s)

    return {
        metrics.STORE_SECONDS: parts.store.seconds,
        metrics.STORE_ERRORS: lambda: parts.store.errors,
        metrics.STORE_LAG: lag,
    }


def _vllm(meters: RequestMetrics) -> Mapping[metrics.Metric, Source]:
    def over_workloads(
        counts: Callable[[RequestSeries], Iterator[tuple[tuple[str, ...], float]]],
    ) -> Callable[[], Values]:
        def read() -> Values:
            sums: dict[tuple[str, ...], float] = {}
            for (model, _), series in meters.series.items():
                for more, count in counts(series):
                    sums[model, ENGINE, *more] = sums.get((model, ENGINE, *more), 0) + count
            return sums

        return read

    def positions(series: RequestSeries) -> Iterator[tuple[tuple[str, ...], float]]:
        for depth, count in series.sums.reached():
            yield (str(depth - 1),), count

    return {
        metrics.VLLM_DRAFTS: over_workloads(lambda series: iter([((), series.sums.rounds_with_drafts)])),
        metrics.VLLM_DRAFTED: over_workloads(lambda series: iter([((), series.sums.drafted)])),
        metrics.VLLM_ACCEPTED: over_workloads(lambda series: iter([((), series.sums.accepted)])),
        metrics.VLLM_POSITIONS: over_workloads(positions),
    }
