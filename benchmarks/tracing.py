"""What tracing costs a verifier with no request traced, one in a hundred, and every one.

usage: python -m benchmarks.tracing [TURNS [CHECKOUT]]     (fails if steps become longer than the aims allow)

32 sessions of 8 candidates on an emulated target of 20 ms a pass, as in `benchmarks.between`, spans sent over OTLP to a
collector in a process of its own. Each way of running is a process of its own, the ways take turns, and each is
compared with another one of the same turn: `off`, this code with tracing off, with `before`, the code in CHECKOUT, if
that is given; the others with `off`. The gap is wall time between two passes, as there: by what it grows a step becomes
longer, for spans are made while the next pass runs. It is that of the fastest tenth, when nobody else had the cores.
CPU is the loop's, without the emulated drafter, and that of the exporter's thread. Calls are those that Python's
profiler counts in a step, with nothing traced.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.between import SOURCE, Between, calls, running
from benchmarks.records import Row, write
from slipstream.engine.thread import ModelThread
from slipstream.interpreter import tune

SESSIONS, NODES, PASS_S = 32, 8, 0.02
WARM_STEPS, STEPS = 30, 150
AIMS = {"off": 0.005, "1 %": 0.01, "100 %": 0.05}
"""Most that a step may become longer, as a share of its pass."""
SHARES = {"before": 0.0, "off": 0.0, "1 %": 0.01, "100 %": 1.0}


class Drafted(Between):
    """Its frames are noticed by the sessions that are traced, whose share changes from step to step."""

    def __init__(self, thread: ModelThread, share: float) -> None:
        super().__init__(thread, SESSIONS, NODES, PASS_S)
        self.feeding_s = 0.0
        self._chance = random.Random(3)
        self._share = share
        self._traces: dict[Any, Any] = {}

    def trace(self, tracing: Any) -> None:
        from slipstream.v1 import types_pb2
        from verifier_svc.tracing import SessionTrace

        self.scheduler.tracing = tracing
        for session in self._texts:
            trace = tracing.begin("generate", {})
            self._traces[session] = SessionTrace(trace, trace.now())
        self._frame = types_pb2.Candidates(token_ids=range(24), confidences=bytes(24))
        self._frame.mark.length = 1

    def feed(self) -> None:
        before = time.thread_time()
        super().feed()
        self.feeding_s += time.thread_time() - before
        now = time.monotonic()
        for session, trace in self._traces.items():
            session.trace = trace if self._chance.random() < self._share else None
            if session.trace is not None:
                self._frame.mark.length += 1
                trace.arrived(SOURCE, self._frame, now)


async def measure(share: float, collector: str) -> dict[str, float]:
    tracing = _tracing(collector) if share else None
    async with ModelThread() as thread:
        drafted = Drafted(thread, share)
        if tracing is not None:
            drafted.trace(tracing)
        tune()
        async with running(drafted):
            await drafted.steps(WARM_STEPS, drafted.feed)
            first, own, all_of_it = len(drafted.ended), time.thread_time(), time.process_time()
            fed, passed = drafted.feeding_s, drafted.busy_s
            await drafted.steps(STEPS, drafted.feed)
            if tracing is not None:
                await asyncio.to_thread(tracing.processors[0].force_flush)
            own, all_of_it = time.thread_time() - own, time.process_time() - all_of_it
            fed, passed = drafted.feeding_s - fed, drafted.busy_s - passed
            steps = len(drafted.ended) - first
    gaps = [1e3 * (drafted.began[at + 1] - drafted.ended[at]) for at in range(first, first + steps - 1)]
    measured = {"gap": statistics.quantiles(gaps, n=10)[0], "loop": 1e3 * (own - fed) / steps}
    measured["beside"] = 1e3 * (all_of_it - own - passed) / steps
    if not share:
        measured["calls"] = await asyncio.to_thread(lambda: asyncio.run(calls(SESSIONS, NODES)))
    return measured


def _tracing(collector: str) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from slipstream.telemetry.tracing import Tracing

    exporter = OTLPSpanExporter(endpoint=collector, insecure=True)
    return Tracing("slipstream-verifier", [BatchSpanProcessor(exporter, max_queue_size=20_000)])


@contextmanager
def collector() -> Iterator[str]:
    """The address of one that takes everything and keeps nothing, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.tracing", "collector"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def collect() -> None:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    class Sink(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Sink(), server)
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    sys.stdin.read()


def child(way: str, address: str, checkout: str) -> dict[str, float]:
    """One way of running, in a process of its own, from the checkout's code."""
    command = [sys.executable, str(Path(__file__).resolve()), "child", str(SHARES[way]), address]
    environment = os.environ | {"PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(pairs: int, before: str) -> bool:
    here = str(Path(__file__).resolve().parents[1])
    ways = [way for way in SHARES if way != "before" or before]
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with collector() as address:
        for turn in range(pairs):
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                runs[way].append(child(way, address, before if way == "before" else here))
            print({way: runs[way][-1] for way in ways}, flush=True)
    rows: list[Row] = []
    for way in ways:
        against = runs["before" if way == "off" and before else "off"]
        both = list(zip(runs[way], against, strict=True))
        gap_ms, loop_ms, beside_ms = (
            statistics.median(each[part] - other[part] for each, other in both) for part in ("gap", "loop", "beside")
        )
        spans = SESSIONS * SHARES[way] + 1 - (1 - SHARES[way]) ** SESSIONS  # and the step's own
        rows.append(
            {
                "traced": way,
                "calls / step": statistics.median(run.get("calls", 0) for run in runs[way]) or None,
                "gap ms": statistics.median(run["gap"] for run in runs[way]),
                "step longer by %": 0.1 * gap_ms / PASS_S,
                "loop, more CPU ms / step": loop_ms,
                "exporter, more CPU ms / step": beside_ms,
                "spans / step": spans,
                "CPU us / span": 1e3 * (loop_ms + beside_ms) / spans if spans > 1 else None,
            }
        )
    write("tracing", f"python -m benchmarks.tracing {pairs}", rows)
    return all(float(row["step longer by %"] or 0.0) <= 100 * AIMS.get(str(row["traced"]), 1.0) for row in rows)


if __name__ == "__main__":
    kind, *rest = [*sys.argv[1:], "5"][:3]
    if kind == "collector":
        collect()
    elif kind == "child":
        print(json.dumps(asyncio.run(measure(float(rest[0]), rest[1]))))
    else:
        sys.exit(not main(int(kind), sys.argv[2] if len(sys.argv) > 2 else ""))
