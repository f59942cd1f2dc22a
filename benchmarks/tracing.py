"""What tracing costs a verifier with no request traced, one in a hundred, and every one.

usage: python -m benchmarks.tracing [PROCESSES]     (fails if steps become longer than the aims allow)

32 sessions of 8 candidates on an emulated target of 20 ms a pass, as in `benchmarks.between`, spans sent over OTLP to
a collector in a process of its own. Two processes differ by more than tracing costs, so one process runs all ways, a
block of steps each, in changing order, and each block is compared with the one of its turn in which nothing was traced.
The gap is wall time between two passes: by what it grows a step becomes longer, for spans are made while the next pass
runs. CPU is the loop's, without the emulated drafter, and that of the exporter's thread.

Code without tracing cannot run in the same process. Without tracing the verifier has one observer less: the loops over
observers are counted in a step, and one is timed.
"""

from __future__ import annotations

import asyncio
import json
import linecache
import math
import os
import random
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from types import FrameType
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from benchmarks.between import SOURCE, Between, InlineThread, running
from benchmarks.records import Row, write
from slipstream.engine.model_thread import ModelThread
from slipstream.process import tune_runtime
from slipstream.telemetry.composite import composite
from slipstream.telemetry.tracing import Tracing
from slipstream.v1 import types_pb2
from verifier_svc.rounds.observer import MessageAnnotator, StepObserver
from verifier_svc.session import Session
from verifier_svc.telemetry.verifier_spans import VerifierTracing, VerifyTrace

SESSIONS, NODES, PASS_S = 32, 8, 0.02
WARM_STEPS, TURNS, STEPS = 60, 14, 40
"""Not more than the sessions' texts have room for (`benchmarks.between`)."""
SHARES = {"off": 0.0, "1 %": 0.01, "100 %": 1.0}
AIMS = {"off": 0.005, "1 %": 0.01, "100 %": 0.05}
"""Most that a step may become longer, as a share of its pass."""

MEDIAN_ERROR = 1.2533 / 1.349
"""Standard error of the median of many nearly normal values, as a share of their interquartile range over the root of
their number."""

Block = dict[str, float]
"""Measured values of one mode: `gap` in ms (the median), `loop` and `beside` in ms of CPU a step."""


class Drafted(Between):
    """Its frames are noticed by the sessions that are traced, a share of them, drawn anew at each step."""

    def __init__(self, thread: ModelThread, tracing: Tracing) -> None:
        super().__init__(thread, SESSIONS, NODES, PASS_S)
        self.observer = VerifierTracing(tracing)
        self.untraced = self.scheduler.observer
        self.unannotated = self.scheduler.annotator
        self.share = 0.0
        self.feeding_s = 0.0
        self._chance = random.Random(3)
        self._traces: dict[Session, VerifyTrace] = {}
        for session in self._texts:
            trace = tracing.begin("generate", {})
            assert trace is not None
            self._traces[session] = VerifyTrace(trace, trace.now())
        self._frame = types_pb2.Candidates(token_ids=range(24), confidences=bytes(24))
        self._frame.mark.length = 1

    def feed(self) -> None:
        before = time.thread_time()
        super().feed()
        self.feeding_s += time.thread_time() - before
        now = time.monotonic()
        for session, trace in self._traces.items():
            self.observer.traces.pop(session, None)
            if self._chance.random() < self.share:
                self.observer.traces[session] = trace
                self._frame.mark.length += 1
                trace.add_frame(SOURCE, self._frame, now)


async def measure(collector: str) -> list[dict[str, Block]]:
    """Turns, each with a block of every way."""
    exporter = OTLPSpanExporter(endpoint=collector, insecure=True)
    exporting = BatchSpanProcessor(exporter, max_queue_size=20_000)
    tracing = Tracing("slipstream-verifier", [exporting])
    turns: list[dict[str, Block]] = []
    async with ModelThread() as thread:
        drafted = Drafted(thread, tracing)
        tune_runtime()
        async with running(drafted):
            await drafted.steps(WARM_STEPS, drafted.feed)
            for turn in range(TURNS):
                ways = sorted(SHARES, key=lambda way: random.Random(f"{turn} {way}").random())
                turns.append({way: await _block(drafted, tracing, exporting, SHARES[way]) for way in ways})
    return turns


async def _block(drafted: Drafted, tracing: Tracing, exporting: BatchSpanProcessor, share: float) -> Block:
    drafted.share = share
    watching = [drafted.untraced, drafted.observer] if share else [drafted.untraced]
    drafted.scheduler.observer = composite(StepObserver, watching)
    adding = [drafted.unannotated, drafted.observer] if share else [drafted.unannotated]
    drafted.scheduler.annotator = composite(MessageAnnotator, adding)
    await drafted.steps(2, drafted.feed)
    first, own, all_of_it = len(drafted.ended), time.thread_time(), time.process_time()
    fed, passed = drafted.feeding_s, drafted.busy_s
    await drafted.steps(STEPS, drafted.feed)
    await asyncio.to_thread(exporting.force_flush)
    own, all_of_it = time.thread_time() - own, time.process_time() - all_of_it
    fed, passed = drafted.feeding_s - fed, drafted.busy_s - passed
    steps = min(len(drafted.began) - 1, len(drafted.ended)) - first
    gaps = [1e3 * (drafted.began[at + 1] - drafted.ended[at]) for at in range(first, first + STEPS - 1)]
    return {
        "gap": statistics.median(gaps),
        "loop": 1e3 * (own - fed) / steps,
        "beside": 1e3 * (all_of_it - own - passed) / steps,
    }


async def questions(steps: int = 20) -> float:
    """Lines a step that call observers, with tracing off, drafters' frames left out."""
    between = Between(InlineThread(), SESSIONS, NODES, 0.0)
    between.scheduler.observer = StepObserver()
    counted = 0

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        return line if "/verifier_svc/" in frame.f_code.co_filename else None

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        counted += event == "line" and ("self.observer." in text or "for observer in" in text)
        return line

    async with running(between):
        await asyncio.sleep(0)
        while len(between.began) < steps:
            if len(between.began) == 2:
                first, counted = len(between.began), 0
                sys.settrace(entered)
            between.feed()
            await asyncio.sleep(0)
        sys.settrace(None)
    return counted / (len(between.began) - first)


def question_s() -> float:
    """Seconds that one such line takes."""

    return min(timeit.repeat("observer.step_ended(0)", globals={"observer": StepObserver()}, number=100_000)) / 100_000


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
    class Sink(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Sink(), server)  # type: ignore[no-untyped-call]
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    sys.stdin.read()


def child(address: str) -> list[dict[str, Block]]:
    command = [sys.executable, "-m", "benchmarks.tracing", "child", address]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    turns: list[dict[str, Block]] = json.loads(done.stdout.splitlines()[-1])
    return turns


def row(way: str, turns: list[dict[str, Block]], asked: float) -> Row:
    more = {
        part: statistics.quantiles([turn[way][part] - turn["off"][part] for turn in turns], n=4)
        for part in ("gap", "loop", "beside")
    }
    asking_s = asked * question_s()
    gaps_s = [asking_s] * 3 if way == "off" else [gap_ms / 1e3 for gap_ms in more["gap"]]
    low, middle, high = (100 * gap_s / PASS_S for gap_s in gaps_s)
    share = SHARES[way]
    spans = SESSIONS * share + 1 - (1 - share) ** SESSIONS  # and the step's own
    loop_ms, beside_ms = (1e3 * asking_s, 0.0) if way == "off" else (more["loop"][1], more["beside"][1])
    return {
        "traced": way,
        "step longer by %": round(middle, 3),
        "middle half": f"{low:.2f} to {high:.2f}",
        "standard error": round(MEDIAN_ERROR * (high - low) / math.sqrt(len(turns)), 2),
        "loop, more CPU ms / step": loop_ms,
        "exporter, more CPU ms / step": beside_ms,
        "spans / step": spans,
        "CPU us / span": 1e3 * (loop_ms + beside_ms) / spans if spans > 1 else None,
        "questions / step": asked if way == "off" else None,
    }


def main(processes: int) -> bool:
    turns: list[dict[str, Block]] = []
    with collector() as address:
        for _ in range(processes):
            turns += child(address)
    asked = asyncio.run(questions())
    rows = [row(way, turns, asked) for way in SHARES]
    write("tracing", f"python -m benchmarks.tracing {processes}", rows)
    return all(float(each["step longer by %"] or 0.0) <= 100 * AIMS[str(each["traced"])] for each in rows)


if __name__ == "__main__":
    kind, *rest = [*sys.argv[1:], "5"]
    if kind == "collector":
        collect()
    elif kind == "child":
        print(json.dumps(asyncio.run(measure(rest[0]))))
    else:
        sys.exit(not main(int(kind)))
