"""Where each metric of a gateway is read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.routing.breaker import BreakerState
from gateway.routing.router import Router
from gateway.store.measured import MeasuredStore
from gateway.store.session_store import StoreMemory
from gateway.store.write_behind import WriteBehindQueue
from gateway.telemetry.request_metrics import MEASURED_OUTCOMES, RequestMetrics, RequestSeries
from gateway.work.tenant_work import TenantWork
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, Renamed, Source, Values, build_info, spans_of
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
    work: TenantWork
    tracing: Tracing | None = None


def metrics_collector(parts: MetricsParts) -> MetricsCollector:
    sources = {
        **_rounds(parts.requests),
        **_requests(parts),
        **_workers(parts),
        **_store(parts),
        **_load(parts),
        **_vllm(parts.requests),
        **_renamed(parts.requests),
    }
    sources[metrics.CANDIDATES_VERIFIED] = lambda: _shares(parts, "drafted")
    sources[metrics.CANDIDATES_ACCEPTED] = lambda: _shares(parts, "accepted")
    sources[metrics.CANDIDATE_ROUNDS] = lambda: _shares(parts, "rounds")
    sources[metrics.BUILD] = build_info("gateway")
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
        metrics.PROMPT: each(lambda series: series.prompt_tokens),
        metrics.EMITTED: each(lambda series: series.sums.emitted),
        metrics.ACCEPTED_BY_DEPTH: depths,
        metrics.HITS: each(lambda series: series.sums.hits),
        metrics.MISSES: misses,
        metrics.ROUND_WAIT: each(lambda series: US * series.sums.wait_us),
        metrics.ROUND_BUBBLE: each(lambda series: US * series.sums.bubble_us),
        metrics.ROUND_VERIFY: each(lambda series: US * series.sums.verify_us),
        metrics.LOSSY_SESSIONS: each(lambda series: series.lossy),
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
        metrics.ARITHMETIC_CHANGES: lambda: requests.arithmetic_changes,
        metrics.TEXT_JOBS_WAITING: lambda: {(kind,): count for kind, count in parts.work.waiting.items()},
        metrics.TEXT_JOB_SECONDS: parts.work.seconds,
        metrics.TEXT_JOB_FAILURES: lambda: parts.work.failures,
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
        metrics.MODEL: lambda: _arithmetics(parts),
        metrics.COST: cost,
        metrics.BREAKER: breakers,
        metrics.DRAFTER_FAILURES: lambda: parts.requests.failures,
        metrics.LINK_BYTES: lambda: parts.traffic.by_label("verifier"),
    }


def _arithmetics(parts: MetricsParts) -> Values:
    """Verifiers that answer, by model, arithmetic and what is promised of it."""
    counts: Counter[tuple[str, ...]] = Counter()
    for verifier in parts.router.verifiers:
        if verifier.model is not None and verifier.present:
            promise = "tokens" if verifier.model.batch_invariant else "distribution"
            model = parts.requests.model_label(verifier.model.name)
            counts[model, parts.requests.arithmetic_label(verifier.arithmetic), promise] += 1
    return dict(counts)


def _store(parts: MetricsParts) -> dict[metrics.Metric, Source]:
    def lag() -> float:
        return max(parts.store.lag_s, 0.0 if parts.write_behind is None else parts.write_behind.lag_s)

    def memory(number: Callable[[StoreMemory], float]) -> Callable[[], Values]:
        def read() -> Values:
            known = parts.store.memory
            return {} if known is None or not known.policy else {(): number(known)}

        return read

    return {
        metrics.STORE_USED: memory(lambda known: known.used_bytes),
        metrics.STORE_MAX: memory(lambda known: known.max_bytes),
        metrics.STORE_EVICTION: memory(lambda known: known.evicts),
        metrics.STORE_SECONDS: parts.store.seconds,
        metrics.STORE_ERRORS: lambda: parts.store.errors,
        metrics.STORE_LAG: lag,
    }


def _load(parts: MetricsParts) -> Mapping[metrics.Metric, Source]:
    """Sources of the metrics that load balancers choose a gateway by."""
    requests, router = parts.requests, parts.router

    def now(number: Callable[[RequestSeries], float]) -> Callable[[], Values]:
        """A gauge that models have before their first request too: load balancers take a missing one for a fault."""

        def read() -> Values:
            sums: dict[tuple[str, ...], float] = {(model, ENGINE): 0 for model in usages()}
            for (model, _), series in requests.series.items():
                sums[model, ENGINE] = sums.get((model, ENGINE), 0) + number(series)
            return sums

        return read

    def usages() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for verifier in router.verifiers:
            if verifier.model is not None and verifier.present:
                found.setdefault(requests.model_label(verifier.model.name), []).append(verifier.kv_usage)
        return found

    def kv_usage() -> Values:
        return {(model, ENGINE): sum(shares) / len(shares) for model, shares in usages().items()}

    return {
        metrics.VLLM_RUNNING: now(lambda series: series.sessions - series.waiting),
        metrics.VLLM_WAITING: now(lambda series: series.waiting),
        metrics.VLLM_KV: kv_usage,
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
        metrics.VLLM_PROMPT: over_workloads(lambda series: iter([((), series.prompt_tokens)])),
        metrics.VLLM_GENERATED: over_workloads(lambda series: iter([((), series.sums.emitted)])),
        metrics.VLLM_SUCCESS: over_workloads(
            lambda series: (((outcome,), series.outcomes[outcome]) for outcome in MEASURED_OUTCOMES)
        ),
        metrics.VLLM_DRAFTS: over_workloads(lambda series: iter([((), series.sums.rounds_with_drafts)])),
        metrics.VLLM_DRAFTED: over_workloads(lambda series: iter([((), series.sums.drafted)])),
        metrics.VLLM_ACCEPTED: over_workloads(lambda series: iter([((), series.sums.accepted)])),
        metrics.VLLM_POSITIONS: over_workloads(positions),
    }


def _renamed(requests: RequestMetrics) -> Mapping[metrics.Metric, Source]:
    def vllm(labels: Mapping[str, str]) -> tuple[str, ...]:
        return labels["model"], ENGINE

    return {
        metrics.VLLM_TTFT: Renamed(requests.ttft, vllm),
        metrics.VLLM_ITL: Renamed(requests.gap, vllm),
        metrics.VLLM_TPOT: Renamed(requests.tpot, vllm),
        metrics.VLLM_E2E: Renamed(requests.e2e, vllm),
        metrics.GEN_AI_TTFT: requests.gen_ai_ttft,
        metrics.GEN_AI_TPOT: requests.gen_ai_tpot,
        metrics.GEN_AI_E2E: requests.gen_ai_e2e,
    }
