"""What counting costs: CPU time of what a round, a step, a pass, a write and a scrape pay for metrics.

usage: python -m benchmarks.counting

Each case runs as it is in the services, with what counts it and without, in turn; CPU time of the process, and the
median of the differences. A scrape is that of a gateway with `KINDS` kinds of requests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest

from benchmarks.records import Row, write
from drafter_svc.metrics_source import DraftStepStats
from gateway.sessions.request_stats import RequestStats
from gateway.store.measured import MeasuredStore
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.telemetry.metrics_source import MetricsParts, metrics_collector
from gateway.telemetry.request_metrics import RequestMetrics, SessionMetrics
from gateway.work.frames import JobFrame
from gateway.work.processes import ProcessSource
from gateway.work.tenant_work import TenantWork
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.v1 import verifier_pb2
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.rounds.observer import StepReport
from verifier_svc.rounds.round_result import RoundResult, StepTiming
from verifier_svc.telemetry.metrics_source import StepStats

DEPTHS = (1, 2, 3, 4, 5, 2, 3, 1)
ROUND = verifier_pb2.Round(
    session=1,
    epoch=1,
    base_length=500,
    token_ids=[11, 12, 13],
    drafted=len(DEPTHS),
    accepted=2,
    wait_us=1500,
    verify_us=20_000,
    bubble_us=100,
    drafters=[verifier_pb2.DrafterShare(drafter="model", drafted=len(DEPTHS), accepted=2)],
)
FRAME = verifier_pb2.DecodeResponse(rounds=[ROUND] * 32)
KINDS = 16
TIMES, PAIRS = 2_000, 15
Case = Callable[[], object]


def nothing() -> None:
    pass


def microseconds(case: Case, times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        case()
    return 1e6 * (time.process_time() - began) / times


def difference(counted: Case, plain: Case, times: int = TIMES) -> tuple[float, float]:
    """Microseconds: plain, and how much more it is counted."""
    pairs = [(microseconds(plain, times), microseconds(counted, times)) for _ in range(PAIRS)]
    return statistics.median(p for p, _ in pairs), statistics.median(c - p for p, c in pairs)


def plan(workload: str) -> Any:
    return SimpleNamespace(model=SimpleNamespace(name="target"), workload=workload)


def ledgers() -> tuple[Case, Case]:
    stats, plain = RequestStats(time.monotonic, 0.0), RequestStats(time.monotonic, 0.0)
    observer = SessionMetrics(RequestMetrics(), plan("chat"), stats)

    def counted() -> None:
        stats.add_round(ROUND)
        observer.round_shown(ROUND)

    return counted, lambda: plain.add_round(ROUND)


def stores() -> tuple[Case, Case]:
    async def renew() -> None:
        """What a store does that does nothing."""

    store = MeasuredStore(MemoryStore(MemoryBackend(), owner="me", ttl_s=60.0, lease_s=10.0))

    def run(coroutine: Any) -> None:
        try:
            coroutine.send(None)
        except StopIteration:
            return

    return lambda: run(store._timed("append", renew())), lambda: run(renew())


def scrape() -> tuple[Case, Case]:
    """On the loop, and on the thread that answers."""
    meters = RequestMetrics()
    for kind in range(KINDS):
        stats = RequestStats(time.monotonic, 0.0)
        stats.add_round(ROUND)
        SessionMetrics(meters, plan(f"kind-{kind}"), stats).round_shown(ROUND)
    config = SimpleNamespace(prices_of_drafters=dict, verifier_price=1.0, verifiers=())
    router = SimpleNamespace(verifiers=[], drafters=[], pools=(), clock=time.monotonic)
    store = MeasuredStore(MemoryStore(MemoryBackend(), owner="me", ttl_s=60.0, lease_s=10.0))
    server = SimpleNamespace(errors={})
    work = TenantWork(ProcessSource("nothing", lambda: JobFrame({})), processes=1, most_bytes=1)
    collector = metrics_collector(MetricsParts(config, meters, router, store, None, ByteCounter(), server, work))  # type: ignore[arg-type]
    collector.read()
    return collector.read, lambda: generate_latest(collector.registry)


def main() -> None:
    stats, passes = StepStats(), DraftStepStats()
    tree = SimpleNamespace(root=SimpleNamespace(path_log_prob=-3.0))
    request = SimpleNamespace(
        session=SimpleNamespace(tree=tree),
        context=SimpleNamespace(expand=[0]),
        tokens=5,
        places=[tree.root, SimpleNamespace(path_log_prob=-4.0)],
    )
    requests: list[Any] = [request] * 32
    timing = StepTiming(0.0, 0.0, 0.02, 0.0, 32, 288)
    report = StepReport(1, [], timing, 0.0)
    scheduled: Any = SimpleNamespace(selection=SimpleNamespace(depths=DEPTHS))
    accepted, miss = AcceptanceResult((0, 1), 7), verifier_pb2.MISS_CAUSE_UNSPECIFIED
    result = RoundResult(scheduled, accepted, [1, 2, 7], timing, 1, miss, 0.0)

    def passed() -> None:
        passes.step_began(requests)
        passes.step_ended(0.002)

    rows: list[Row] = []
    reading, page = scrape()
    for name, (counted, plain), times in [
        ("gateway, a round", ledgers(), TIMES),
        ("gateway, a write to the store", stores(), TIMES),
        ("gateway or verifier, a frame of 32 rounds", (FRAME.ByteSize, nothing), TIMES),
        ("verifier, a round of 8 candidates", (lambda: stats.round_reported(result), nothing), TIMES),
        ("verifier, a step", (lambda: stats.step_ended(report), nothing), TIMES),
        ("drafter, a pass of 32 sessions", (passed, nothing), TIMES),
        (f"gateway, a scrape of {KINDS} kinds, on the loop", (reading, nothing), 200),
        (f"gateway, a scrape of {KINDS} kinds, on a thread", (page, nothing), 20),
    ]:
        without, more = difference(counted, plain, times)
        rows.append({"what": name, "without, µs": without, "counting adds, µs": more})
    write("counting", "python -m benchmarks.counting", rows)


if __name__ == "__main__":
    main()
