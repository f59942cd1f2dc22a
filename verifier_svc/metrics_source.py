"""Where a verifier's metrics come from."""

from __future__ import annotations

from collections import Counter

from slipstream.engine.engine import Engine
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, Values, spans_of
from slipstream.telemetry.tracing import Tracing
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.sources.candidate_sources import CandidateSources


def meter(
    scheduler: Scheduler,
    engine: Engine,
    drafters: CandidateSources,
    gateways: ByteCounter,
    server: Server,
    tracing: Tracing | None,
) -> MetricsCollector:
    """`gateways`: what came and went on their streams."""
    tally, memory = scheduler.tally, scheduler.memory
    return MetricsCollector(
        "verifier",
        {
            metrics.RPC_ERRORS: lambda: server.errors,
            metrics.SPANS: spans_of(tracing),
            metrics.LINK_BYTES: lambda: gateways.by_label("gateway") | drafters.traffic.by_label("drafter"),
            metrics.VERIFIER_SESSIONS: lambda: len(scheduler),
            metrics.VERIFIER_WAITING: lambda: memory.waiting,
            metrics.KV_TOTAL: lambda: engine.blocks_total,
            metrics.KV_USED: lambda: engine.blocks_total - engine.blocks_free,
            metrics.PREEMPTIONS: lambda: memory.preemptions,
            metrics.PREFIX_SOUGHT: lambda: memory.tokens_sought,
            metrics.PREFIX_FOUND: lambda: memory.tokens_found,
            metrics.STEP_SECONDS: tally.seconds,
            metrics.STEP_SESSIONS: tally.sessions,
            metrics.STEP_TOKENS: tally.tokens,
            metrics.COMMITTED: lambda: scheduler.tokens,
            metrics.DRAFT_WAIT: lambda: tally.waited_s,
            metrics.DEPTH_DRAFTED: lambda: _labelled(tally.drafted),
            metrics.DEPTH_ACCEPTED: lambda: _labelled(tally.accepted),
            metrics.ROLLED_BACK: lambda: tally.rolled_back,
            metrics.ROLLED_BACK_SECONDS: lambda: tally.rolled_back_s,
            metrics.DROPPED: lambda: _labelled(drafters.dropped),
        },
    )


def _labelled(counts: Counter[int] | Counter[str]) -> Values:
    return {(str(name),): count for name, count in counts.items()}
