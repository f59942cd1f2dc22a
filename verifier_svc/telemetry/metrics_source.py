"""Values of a verifier's metrics: counted as steps and rounds end, or read when metrics are scraped."""

from __future__ import annotations

from collections import Counter

from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, Values, build_info, forward_info, spans_of
from slipstream.telemetry.tracing import Tracing
from verifier_svc.rounds.observer import StepObserver, StepReport
from verifier_svc.rounds.round_result import RoundResult
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.wait_policy.wait_policy import PAUSE_CAUSES


class StepStats(StepObserver):
    """Counts steps, rounds and their candidates."""

    def __init__(self) -> None:
        self.seconds = metrics.STEP_SECONDS.histogram()
        self.sessions = metrics.STEP_SESSIONS.histogram()
        self.tokens = metrics.STEP_TOKENS.histogram()
        self.waited_s = 0.0
        """Seconds for which steps were held back for candidates."""
        self.drafted: Counter[int] = Counter()
        """Candidates verified, by depth."""
        self.accepted_lengths: Counter[int] = Counter()
        """Rounds with candidates, by acceptance length."""
        self.rejected = 0
        self.rejected_s = 0.0

    def step_ended(self, report: StepReport) -> None:
        timing = report.timing
        self.seconds.observe(timing.seconds)
        self.sessions.observe(timing.sessions)
        self.tokens.observe(timing.tokens)
        self.waited_s += timing.waited
        self.rejected_s += report.rejected_s

    def round_reported(self, result: RoundResult) -> None:
        depths = result.scheduled.selection.depths
        if depths:
            for depth in depths:
                self.drafted[depth] += 1
            self.accepted_lengths[result.accepted] += 1
            self.rejected += len(depths) - result.accepted

    @property
    def accepted(self) -> Counter[int]:
        """Candidates accepted, by depth: a path of three has one at each of three depths."""
        reached: Counter[int] = Counter()
        for length, rounds in self.accepted_lengths.items():
            reached.update(dict.fromkeys(range(1, length + 1), rounds))
        return reached


def metrics_collector(
    scheduler: Scheduler,
    stats: StepStats,
    sources: CandidateSources,
    gateway_bytes: ByteCounter,
    server: Server,
    tracing: Tracing | None,
) -> MetricsCollector:
    admission, kv, model = scheduler.kv_admission, scheduler.executor.kv, scheduler.executor.model
    return MetricsCollector(
        "verifier",
        {
            metrics.BUILD: build_info("verifier"),
            metrics.FORWARD: forward_info(model.forward_path, model.forward_notice),
            metrics.RPC_ERRORS: lambda: server.errors,
            metrics.SPANS: spans_of(tracing),
            metrics.LINK_BYTES: lambda: gateway_bytes.by_label("gateway") | sources.traffic.by_label("drafter"),
            metrics.VERIFIER_SESSIONS: lambda: len(scheduler),
            metrics.VERIFIER_WAITING: lambda: admission.refused,
            metrics.KV_TOTAL: lambda: kv.blocks_total,
            metrics.KV_USED: lambda: kv.blocks_total - kv.blocks_free,
            metrics.PREEMPTIONS: lambda: admission.preemptions,
            metrics.PREFIX_QUERIED: lambda: admission.prefix_tokens_sought,
            metrics.PREFIX_HIT: lambda: admission.prefix_tokens_found,
            metrics.STEP_SECONDS: stats.seconds,
            metrics.STEP_SESSIONS: stats.sessions,
            metrics.STEP_TOKENS: stats.tokens,
            metrics.COMMITTED: lambda: scheduler.tokens,
            metrics.STEP_FAULTS: lambda: _labelled(scheduler.step_faults),
            metrics.DRAFT_WAIT: lambda: stats.waited_s,
            metrics.DRAFTING_PAUSED: lambda: {(cause,): int(cause == scheduler.pause_cause) for cause in PAUSE_CAUSES},
            metrics.DRAFTING_SLOWDOWN: lambda: scheduler.drafting_slowdown,
            metrics.DEPTH_DRAFTED: lambda: _labelled(stats.drafted),
            metrics.DEPTH_ACCEPTED: lambda: _labelled(stats.accepted),
            metrics.REJECTED: lambda: stats.rejected,
            metrics.REJECTED_SECONDS: lambda: stats.rejected_s,
            metrics.DROPPED: lambda: _labelled(sources.dropped),
        },
    )


def _labelled(counts: Counter[int] | Counter[str]) -> Values:
    return {(str(name),): count for name, count in counts.items()}
