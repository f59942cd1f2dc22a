"""What stands between two passes of a verifier: judging, committing, choosing, and handing over to the model's thread.

usage: python -m benchmarks.between     (fails if 32 sessions without candidates take longer than AIM_S)

The scheduler alone, on an emulated target of 5 ms a pass, with neither gateways nor drafters: while a pass runs, each
session's tree gets a frame of guesses of which 0.85 are right, as a drafter that keeps up would send them. The gap is
wall time from the end of one `forward` to the beginning of the next, without waits for candidates; calls are those that
Python's profiler counts in a step, the pass and the frames left out, and do not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.records import Row, write
from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.engine import ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.model_thread import ModelThread
from slipstream.engine.segment import Segment
from slipstream.process import tune_runtime
from slipstream.rpc import proto_conversion
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.session import Session, SessionRequest
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.telemetry.metrics_source import StepStats

AIM_S = 0.001
PASS_S = 0.005
RIGHT = 0.85
SOURCE = 1
AHEAD = 4
"""Places that a drafter is ahead of what a step takes."""
LENGTH = 8_000
WARM_STEPS, STEPS = 100, 400
CASES = ((1, 0), (32, 0), (64, 0), (1, 8), (32, 8), (64, 8))


class InlineThread:
    """For `ModelThread`, where nothing may depend on the machine: the caller's own thread."""

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)


class Between:
    """A scheduler of `sessions` sessions, and when its passes began and ended."""

    def __init__(self, thread: ModelThread | InlineThread, sessions: int, nodes: int, pass_s: float) -> None:
        engine = open_engine(f"emulated:vocabulary=4096&base_ms={1e3 * pass_s}", kv_tokens=sessions * LENGTH)
        assert isinstance(engine, EmulatedEngine)
        drafters = CandidateSources(proto_conversion.model_to_proto(engine.model), 0.02)
        curve = CostCurve()
        for size in BUCKETS:
            curve.record(size, sessions, [PASS_S])
        planner = Planner(drafters, StepLimits(512, 256, max_wait_s=0.0), curve)
        executor, observers = EmbeddedExecutor(engine), [StepStats(), drafters.shadows]
        self.scheduler = Scheduler(executor, thread, drafters, planner, observers=observers)  # type: ignore[arg-type]
        self.began: list[float] = []
        self.ended: list[float] = []
        self.busy_s = 0.0
        """CPU inside the passes."""
        self.engine = engine
        self._forward = engine.forward
        engine.forward = self.forward  # type: ignore[method-assign, assignment]
        self._nodes = nodes
        self._random = random.Random(7)
        self._texts: dict[Session, list[int]] = {}
        for number in range(sessions):
            session = _session(number, nodes)
            self._texts[session] = [*session.tokens, *engine.text(session.tokens, LENGTH)]
            self.scheduler.add_session(session)

    def forward(self, segments: list[Segment]) -> ModelOutput:
        self.began.append(time.perf_counter())
        before = time.thread_time()
        output = self._forward(segments)
        self.busy_s += time.thread_time() - before
        self.ended.append(time.perf_counter())
        return output

    def feed(self) -> None:
        """A frame for every session: a chain that is mostly right, and another guess at each of its places."""
        for session, text in self._texts.items():
            base, parent = len(session.tokens), 0
            tokens, parents = list[int](), list[int]()
            for right in text[base : base + self._nodes + AHEAD]:
                wrong = (right + 1) % 4096
                tokens += (right, wrong) if self._random.random() < RIGHT else (wrong, right)
                parents += (parent, parent)
                parent = len(tokens) - 1
            confidences = (-0.15, -2.0) * (len(tokens) // 2)
            session.tree.graft(
                Frame(base, len(self.began), 1, tuple(tokens), confidences, tuple(parents), source=SOURCE)
            )

    async def steps(self, count: int, feeding: Callable[[], None]) -> None:
        """Waits for so many more, each with a feeding while it runs."""
        for _ in range(count):
            before = len(self.began)
            while len(self.began) == before:
                await asyncio.sleep(0.0002)
            feeding()


@asynccontextmanager
async def running(between: Between) -> AsyncIterator[None]:
    loop = asyncio.create_task(between.scheduler.run())
    try:
        yield
    finally:
        loop.cancel()


async def measure(sessions: int, nodes: int) -> Row:
    async with ModelThread() as thread:
        between = Between(thread, sessions, nodes, PASS_S)
        feeding = between.feed if nodes else lambda: None
        tune_runtime()  # as `python -m verifier_svc` does
        async with running(between):
            await between.steps(WARM_STEPS, feeding)
            first, tokens = len(between.ended), between.scheduler.tokens
            await between.steps(STEPS, feeding)
    last = min(len(between.began), len(between.ended) + 1) - 1
    gaps = [1e3 * (between.began[at + 1] - between.ended[at]) for at in range(first, last)]
    quartiles = statistics.quantiles(gaps, n=4)
    return {
        "sessions": sessions,
        "candidates of each": nodes,
        "tokens / session and step": (between.scheduler.tokens - tokens) / sessions / (last - first),
        "gap ms": quartiles[1],
        "first quartile": quartiles[0],
        "third": quartiles[2],
        "calls / step": await asyncio.to_thread(lambda: asyncio.run(calls(sessions, nodes))),
    }


async def calls(sessions: int, nodes: int, steps: int = 50) -> float:
    """Function calls of a step; independent of clock and threads."""
    between = Between(InlineThread(), sessions, nodes, 0.0)
    profile = cProfile.Profile()
    forward = between.forward

    def pausing(segments: list[Segment]) -> ModelOutput:
        profile.disable()
        if nodes:
            between.feed()
        output = forward(segments)
        profile.enable()
        return output

    between.engine.forward = pausing  # type: ignore[method-assign, assignment]
    async with running(between):
        await asyncio.sleep(0)
        while len(between.began) < steps:
            await asyncio.sleep(0)
        profile.disable()
    counted: float = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return counted / len(between.began)


def _session(number: int, nodes: int) -> Session:
    prompt = [number + 1, 2, 3, 4]
    request = SessionRequest(
        id=str(number),
        number=number,
        epoch=1,
        sampling=SamplingParams(temperature=0.0),
        prompt_length=len(prompt),
        max_length=LENGTH,
        stop_token_ids=frozenset(),
        max_draft_tokens=nodes,
    )
    session = Session(
        request,
        tokens=prompt,
        credit=None,
        tree=CandidateTree(prompt),
        history=None,
    )
    session.name_source(SOURCE, "model")
    return session


async def main() -> bool:
    rows = []
    for sessions, nodes in CASES:
        rows.append(await measure(sessions, nodes))
        print(rows[-1], flush=True)
    write("between", "python -m benchmarks.between", rows)
    plain = next(row for row in rows if (row["sessions"], row["candidates of each"]) == (32, 0))
    return float(plain["gap ms"] or 0.0) <= 1e3 * AIM_S


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
