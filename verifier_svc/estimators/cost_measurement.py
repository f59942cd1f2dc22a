"""The start-up measurement of the cost curve."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.engine.engine import Engine
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.model_info import MOST_CANDIDATES
from slipstream.engine.segment import KVSequence, Segment
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve

SESSIONS = (1, 4, 16, 64)
CONTEXT = 16
"""Tokens under each session while it is measured."""
REPEATS = 3
"""Forwards per size; the fastest counts."""
BRANCH = 8
"""A measured candidate tree consists of chains of this length."""
TOKEN = 0
"""Every vocabulary has it, and the time does not depend on it."""


Run = Callable[[list[Segment]], None]
"""Runs one step and waits for its end."""


def measure(
    curve: CostCurve,
    engine: Engine,
    most_tokens: int,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """`measure_steps` of an engine's forward passes."""

    def run(segments: list[Segment]) -> None:
        # Reading a number waits for a device that computes on its own.
        logits = engine.forward(segments).logits
        if len(logits):
            logits[0, 0].item()

    most = engine.model.most_candidates
    measure_steps(MeasuredSteps(curve, engine.kv, run, most_tokens, most_candidates=most), limit_s, clock)


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Bounds of the steps to measure, and the curve that keeps the results."""

    curve: CostCurve
    kv: KVCache
    run: Run
    most_tokens: int
    """Most tokens of one step."""
    most_sessions: int = SESSIONS[-1]
    longest_chain: int | None = None
    """Where candidates must be chains, the longest one; None: trees."""
    most_candidates: int = MOST_CANDIDATES
    """Most candidates of one session; the rest of a measured step are tokens of a prompt."""


def measure_steps(steps: MeasuredSteps, limit_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
    """Times steps of 1 .. `most_tokens` tokens for about `limit_s` seconds. On the model's own thread.

    Small sizes come first, so that a slow machine measures at least those that it can afford; the curve fills in the
    rest. No step is started that is expected to end too late. Afterwards all KV blocks are free again; sizes for which
    the pool has no room, or whose candidates the executor cannot verify, are left out.
    """
    room = steps.kv.blocks_free * steps.kv.block_size - CONTEXT
    steps = replace(steps, most_tokens=min(steps.most_tokens, BUCKETS[-1], room))
    bench = _Bench(steps, clock, clock() + limit_s)
    try:
        for tokens in BUCKETS:
            for sessions in SESSIONS:
                if bench.possible(tokens, sessions) and bench.open(sessions):
                    bench.record(tokens, sessions)
    finally:
        bench.close()


class _Bench:
    def __init__(self, steps: MeasuredSteps, clock: Callable[[], float], end: float) -> None:
        self._steps = steps
        self._clock = clock
        self._end = end
        self._sequences: list[KVSequence] = []

    def possible(self, tokens: int, sessions: int) -> bool:
        """Whether a step may hold so many tokens of so many sessions."""
        longest = self._steps.longest_chain
        short = longest is None or tokens <= sessions * (1 + longest)
        return short and sessions <= min(tokens, self._steps.most_sessions) and tokens <= self._steps.most_tokens

    def open(self, sessions: int) -> bool:
        """Whether there are so many sequences with their context now."""
        missing = sessions - len(self._sequences)
        if missing <= 0:
            return True
        kv, most = self._steps.kv, self._steps.most_tokens
        context = min(CONTEXT, kv.max_length - 1, most)
        capacity = context + -(-most // sessions)
        fits = missing * -(-capacity // kv.block_size) <= kv.blocks_free
        if not fits or not self._affordable(missing * context, missing):
            return False
        at_once = max(1, most // context)  # no step is larger than those that are served
        while missing:
            opened = [kv.begin_unshared(capacity) for _ in range(min(missing, at_once))]
            self._sequences += opened
            segments = [Segment(each, [TOKEN] * context, want_logits=False) for each in opened]
            self._steps.run(segments)
            for segment in segments:
                kv.keep(segment, [])
            missing -= len(opened)
        return True

    def record(self, tokens: int, sessions: int) -> None:
        durations: list[float] = []
        branch = self._steps.longest_chain or BRANCH
        while len(durations) < REPEATS and self._affordable(tokens, sessions):
            step = _step(self._sequences[:sessions], tokens, branch, self._steps.most_candidates)
            durations.append(self._duration(step))
        if durations:
            self._steps.curve.record(tokens, sessions, durations)

    def close(self) -> None:
        for sequence in self._sequences:
            self._steps.kv.close(sequence)

    def _affordable(self, tokens: int, sessions: int) -> bool:
        return self._clock() + self._steps.curve.seconds(tokens, sessions) <= self._end

    def _duration(self, segments: list[Segment]) -> float:
        started = self._clock()
        self._steps.run(segments)
        return self._clock() - started


def _step(sequences: list[KVSequence], tokens: int, branch: int, most: int) -> list[Segment]:
    """One committed token per sequence, and chains of `branch` candidates that fill the step up, `most` of a sequence;
    the rest are further committed tokens."""
    segments: list[Segment] = []
    for index, sequence in enumerate(sequences):
        further = (tokens - index - 1) // len(sequences)
        nodes = min(further, most)
        parents = [node - 1 if node % branch else -1 for node in range(nodes)]
        segments.append(Segment(sequence, [TOKEN] * (1 + further - nodes), [TOKEN] * nodes, parents))
    return segments
