"""Histograms of requests name traces that the collector keeps, and no others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Histogram

from gateway.request_context import RequestContext
from gateway.sessions.request_stats import RequestStats
from gateway.telemetry.kept_traces import kept_at_rate
from gateway.telemetry.observers import GatewayObservers
from gateway.telemetry.request_metrics import Objectives, RequestMetrics
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Clocks, Tracing
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.unit.gateway.telemetry.test_late_requests import Kept

BOUND = Objectives(ttft_s=1.0, tpot_s=0.1)
MODEL: Any = SimpleNamespace(model=SimpleNamespace(name="m"), workload="", arm="")


class Gateway:
    """Requests one after the other, of a gateway whose clock moves only while they take time."""

    def __init__(self, keep_percent: float, *, traced: bool = True) -> None:
        self._now_s, self.spans = 0.0, Kept()
        clocks = Clocks(monotonic_s=lambda: self._now_s)
        tracing = Tracing("slipstream-gateway", [self.spans], clocks, keep_percent=keep_percent)
        self.metrics = RequestMetrics(BOUND)
        self._observers = GatewayObservers(self.metrics, tracing if traced else None)

    def send(
        self, *, ttft_s: float = 0.5, tpot_s: float = 0.05, drafted: int = 0, rehomed: int = 0, asked: str = "00"
    ) -> str:
        """A request of 11 tokens. Returns its trace's id. `asked`: 01 where its client asks for the trace."""
        trace = f"{random.getrandbits(128):032x}"
        context = RequestContext(headers=(("traceparent", f"00-{trace}-{'2' * 16}-{asked}"),))
        with self._observers.watch_request(spans.GENERATE, context) as request:
            stats = RequestStats(lambda: self._now_s, self._now_s)
            session = self._observers.watch_session("s", MODEL, stats, from_beginning=True)
            session.run_began()
            stats.rehomed = rehomed
            for tokens, seconds in ((1, ttft_s), (10, 10 * tpot_s)):
                self._now_s += seconds
                done = verifier_pb2.Round(token_ids=[1] * tokens, drafted=drafted)
                stats.add_round(done)
                session.round_shown(done)
                request.event_sent(gateway_pb2.Delta(text="a"))
            stats.close()
            session.run_ended("stop")
            sums = gateway_pb2.Statistics(
                ttft_s=ttft_s, e2e_s=ttft_s + 10 * tpot_s, emitted=11, drafted=2 * drafted, rehomed=rehomed
            )
            request.event_sent(gateway_pb2.Finished(statistics=sums))
        return trace

    def named(self, histogram: Histogram) -> set[str]:
        """The traces that a histogram names now: of each bucket the last one."""
        samples = next(iter(histogram.collect())).samples
        return {each.exemplar.labels["trace_id"] for each in samples if each.exemplar}

    @property
    def everywhere(self) -> set[str]:
        metrics = self.metrics
        return self.named(metrics.ttft) | self.named(metrics.tpot) | self.named(metrics.e2e)


@pytest.fixture(autouse=True)
def the_client_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")


def test_an_ordinary_request_beyond_the_rate_is_not_named() -> None:
    gateway = Gateway(keep_percent=0.0)
    gateway.send()
    gateway.send(drafted=20)
    assert not gateway.everywhere


def test_a_request_that_missed_an_objective_is_named_though_it_was_not_sampled() -> None:
    gateway = Gateway(keep_percent=0.0)
    slow = gateway.send(tpot_s=0.2)
    assert gateway.named(gateway.metrics.tpot) == gateway.named(gateway.metrics.e2e) == {slow}
    assert not gateway.named(gateway.metrics.ttft)  # when the first token came it had missed nothing
    late = gateway.send(ttft_s=2.0)
    assert gateway.named(gateway.metrics.ttft) == {late}


def test_a_request_that_moved_or_was_mostly_rejected_is_named() -> None:
    gateway = Gateway(keep_percent=0.0)
    moved = gateway.send(rehomed=1)
    assert gateway.everywhere == {moved}
    wasted = gateway.send(tpot_s=0.04, drafted=30)
    assert wasted in gateway.named(gateway.metrics.tpot)


def test_a_request_whose_trace_was_asked_for_is_named() -> None:
    gateway = Gateway(keep_percent=0.0)
    assert gateway.send(asked="01") in gateway.named(gateway.metrics.ttft)


def test_without_tracing_no_trace_is_named() -> None:
    gateway = Gateway(keep_percent=100.0, traced=False)
    gateway.send(ttft_s=5.0)
    assert not gateway.everywhere


def test_each_named_trace_has_a_span_that_the_collector_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    gateway, named = Gateway(keep_percent=20.0), set[str]()
    for number in range(120):
        gateway.send(tpot_s=0.05 if number % 10 else 0.2)
        named |= gateway.everywhere
    kept = set[str]()
    for span in gateway.spans.spans:
        assert span.context is not None
        if (span.attributes or {}).get(spans.LATE) or kept_at_rate(span.context.trace_id, 20.0):
            kept.add(f"{span.context.trace_id:032x}")
    assert 12 < len(named) < 90 and named == kept


def test_the_rate_is_met() -> None:
    draws = random.Random(7)
    kept = sum(kept_at_rate(draws.getrandbits(128), 1.0) for _ in range(20_000))
    assert 140 < kept < 260
    assert kept_at_rate(1, 100.0) and not kept_at_rate(1, 0.0)
