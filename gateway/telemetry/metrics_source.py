"""Where each metric of a gateway is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.routing.breaker import BreakerState
from gateway.routing.router import Router
from gateway.store.measured import MeasuredStore
from gateway.store.write_behind import WriteBehindQueue
from gateway.telemetry.request_metrics import RequestMetrics, RequestSeries
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, Source, Values, spans_of
from slipstream.telemetry.tracing import Tracing

STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
ENGINE = "0"
"""vLLM numbers its engines; a gateway counts as one."""
US = 1e-6


@dataclass(frozen=True, slots=True)
class MetricsParts:
    """The parts of a gateway that metrics are read from."""

    config: GatewayConfig
    requests: RequestMetrics
    router: Router
    store: MeasuredStore
    write_behind: WriteBehindQueue | None
    traffic: ByteCounter
    server: Server
    tracing: Tracing | None = None


def metrics_collector(parts: MetricsParts) -> MetricsCollector:
    sources = {
        **_rounds(parts.requests),
        **_requests(parts),
        **_workers(parts),
        **_store(parts),
        **_vllm(parts.requests),
    }
    sources[metrics.CANDIDATES_VERIFIED] = lambda: _shares(parts, "drafted")
    sources[metrics.CANDIDATES_ACCEPTED] = lambda: _shares(parts, "accepted")
    sources[metrics.CANDIDATE_ROUNDS] = lambda: _shares(parts, "rounds")
    sources[metrics.RPC_ERRORS] = lambda: parts.server.errors
    sources[metrics.SPANS] = spans_of(parts.tracing)
    return MetricsCollector("gateway", sources)


def _rounds(requests: RequestMetrics) -> dict[metrics.Metric, Source]:
    def each(number: Callable[[RequestSeries], float]) -> Callable[[], Values]:
        return lambda: {labels: number(series) for labels, series in requests.series.items()}

    def misses() -> Values:
        return {
            (*labels, cause): count
            for labels, series in requests.series.items()
            for cause, count in series.sums.misses.items()
        }

    def depths() -> Values:
        return {
            (*labels, str(depth)): count
            for labels, series in requests.series.items()
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
        metrics.TTFT: requests.ttft,
        metrics.TPOT: requests.tpot,
        metrics.GAP: requests.gap,
        metrics.E2E: requests.e2e,
    }


def _shares(parts: MetricsParts, field: str) -> Values:
    named = parts.requests.methods
    methods = {drafter.pool: named(drafter.method) for drafter in parts.router.drafters if drafter.method}
    return {
        (model, name, methods.get(name, ""), workload): getattr(share, field)
        for (model, workload), series in parts.requests.series.items()
        for name, share in series.sums.shares.items()
    }


def _requests(parts: MetricsParts) -> dict[metrics.Metric, Source]:
    requests, objectives = parts.requests, parts.requests.objectives

    def outcomes() -> Values:
        counts = {
            (*labels, outcome): count
            for labels, series in requests.series.items()
            for outcome, count in series.outcomes.items()
        }
        return counts | {("", "", "refused"): requests.refused}

    return {
        metrics.REQUESTS: outcomes,
        metrics.OBJECTIVE: lambda: {("ttft",): objectives.ttft_s, ("tpot",): objectives.tpot_s},
        metrics.GATEWAY_SESSIONS: lambda: requests.sessions,
        metrics.GATEWAY_WAITING: lambda: requests.waiting,
        metrics.REHOMINGS: lambda: requests.rehomings,
    }


def _workers(parts: MetricsParts) -> dict[metrics.Metric, Source]:
    router, prices = parts.router, parts.config.prices_of_drafters()

    def present() -> Values:
        """Workers that answer, by every name in the configuration, 0 included."""
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
        return {(name,): state for state, name in states}  # the worst state among a name's replicas

    return {
        metrics.WORKERS: present,
        metrics.COST: cost,
        metrics.BREAKER: breakers,
        metrics.DRAFTER_FAILURES: lambda: parts.requests.failures,
        metrics.LINK_BYTES: lambda: parts.traffic.by_label("verifier"),
    }


def _store(parts: MetricsParts) -> dict[metrics.Metric, Source]:
    def lag() -> float:
        return max(parts.store.lag_s, 0.0 if parts.write_behind is None else parts.write_behind.lag_s)

    return {
        metrics.STORE_SECONDS: parts.store.seconds,
        metrics.STORE_ERRORS: lambda: parts.store.errors,
        metrics.STORE_LAG: lag,
    }


def _vllm(requests: RequestMetrics) -> Mapping[metrics.Metric, Source]:
    def over_workloads(
        counts: Callable[[RequestSeries], Iterator[tuple[tuple[str, ...], float]]],
    ) -> Callable[[], Values]:
        def read() -> Values:
            sums: dict[tuple[str, ...], float] = {}
            for (model, _), series in requests.series.items():
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
