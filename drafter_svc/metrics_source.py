"""Where a drafter's metrics come from."""

from __future__ import annotations

from drafter_svc.scheduler import DraftScheduler
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, spans_of
from slipstream.telemetry.tracing import Tracing


def meter(
    scheduler: DraftScheduler, verifiers: ByteCounter, server: Server, tracing: Tracing | None
) -> MetricsCollector:
    """`verifiers`: what came and went on their streams."""
    tally = scheduler.tally
    return MetricsCollector(
        "drafter",
        {
            metrics.RPC_ERRORS: lambda: server.errors,
            metrics.SPANS: spans_of(tracing),
            metrics.LINK_BYTES: lambda: verifiers.by_label("verifier"),
            metrics.DRAFTER_SESSIONS: lambda: len(scheduler),
            metrics.DRAFTER_BUSY: lambda: tally.busy_s,
            metrics.DRAFTER_NEEDED: lambda: tally.needed_s,
            metrics.PASS_SECONDS: tally.seconds,
            metrics.PASS_SESSIONS: tally.sessions,
            metrics.PASS_TOKENS: tally.tokens,
            metrics.GUESSED: lambda: tally.guessed,
            metrics.TOLD: lambda: tally.told,
        },
    )
