"""Where a drafter's metrics come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.proposers.drafting.scheduler import DraftScheduler, DraftStepObserver
from slipstream.proposers.drafting.step import DraftRequest
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, build_info, forward_info, spans_of
from slipstream.telemetry.tracing import Tracing
from slipstream.v1 import types_pb2


class DraftStepStats(DraftStepObserver):
    """Counts what a drafter's steps cost and bring."""

    def __init__(self) -> None:
        self.seconds = metrics.PASS_SECONDS.histogram()
        self.sessions = metrics.PASS_SESSIONS.histogram()
        self.tokens = metrics.PASS_TOKENS.histogram()
        self.busy_s = 0.0
        """Seconds in which a step ran."""
        self.needed_s = 0.0
        """Seconds of each session in a step, times the probability that its text needs what the step proposes."""
        self._needing = 0.0
        self.proposed = self.sent = 0

    def step_began(self, requests: Sequence[DraftRequest]) -> None:
        self.sessions.observe(len(requests))
        self.tokens.observe(sum(request.tokens for request in requests))
        self._needing = sum(map(_need, requests))

    def step_ended(self, seconds: float) -> None:
        self.busy_s += seconds
        self.needed_s += seconds * self._needing
        self.seconds.observe(seconds)

    def nodes_proposed(self, count: int) -> None:
        self.proposed += count

    def nodes_sent(self, count: int) -> None:
        self.sent += count


def _need(request: DraftRequest) -> float:
    """Probability that the text passes through the likeliest node that is expanded. A drafter with nothing to catch up
    on is as busy as any, but on ever less likely nodes. What is committed, or a prompt to be read, is certain."""
    if not request.context.expand:
        return 1.0
    best = request.places[1 + request.context.expand[0]]
    return math.exp(best.path_log_prob - request.session.tree.root.path_log_prob)


def collect_metrics(
    model: types_pb2.ModelInfo,
    scheduler: DraftScheduler,
    stats: DraftStepStats,
    verifiers: ByteCounter,
    server: Server,
    tracing: Tracing | None,
) -> MetricsCollector:
    """`verifiers` counts the bytes on their streams."""
    return MetricsCollector(
        "drafter",
        {
            metrics.BUILD: build_info("drafter"),
            metrics.FORWARD: forward_info(model.forward_path, model.forward_notice),
            metrics.RPC_ERRORS: lambda: server.errors,
            metrics.SPANS: spans_of(tracing),
            metrics.LINK_BYTES: lambda: verifiers.by_label("verifier"),
            metrics.DRAFTER_SESSIONS: lambda: len(scheduler),
            metrics.DRAFTER_BUSY: lambda: stats.busy_s,
            metrics.DRAFTER_NEEDED: lambda: stats.needed_s,
            metrics.PASS_SECONDS: stats.seconds,
            metrics.PASS_SESSIONS: stats.sessions,
            metrics.PASS_TOKENS: stats.tokens,
            metrics.DRAFTED_CANDIDATES: lambda: stats.proposed,
            metrics.SENT_CANDIDATES: lambda: stats.sent,
        },
    )
