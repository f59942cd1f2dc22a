"""The start-up measurement of the cost curve."""

from __future__ import annotations

import time
from collections.abc import Callable

from slipstream.engine.engine import Engine, begin_unshared
from slipstream.engine.segment import Segment, Sequence
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


def measure(
    curve: CostCurve,
    engine: Engine,
    most_tokens: int,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Times forwards of 1 .. `most_tokens` tokens for about `limit_s` seconds. On the model's own thread.

    Small sizes come first, so that a slow machine measures at least those that it can afford; the curve fills in the
    rest. No forward is started that is expected to end too late. Afterwards all KV blocks are free again; sizes for
    which the pool has no room are left out.
    """
    most_tokens = min(most_tokens, BUCKETS[-1], engine.blocks_free * engine.block_size - CONTEXT)
    bench = _Bench(curve, engine, most_tokens, clock, clock() + limit_s)
    try:
        for tokens in BUCKETS:
            for sessions in SESSIONS:
                if sessions <= tokens <= most_tokens and bench.open(sessions):
                    bench.record(tokens, sessions)
    finally:
        bench.close()


class _Bench:
    def __init__(
        self, curve: CostCurve, engine: Engine, most_tokens: int, clock: Callable[[], float], end: float
    ) -> None:
        self._curve = curve
        self._engine = engine
        self._most_tokens = most_tokens
        self._clock = clock
        self._end = end
        self._sequences: list[Sequence] = []

    def open(self, sessions: int) -> bool:
        """Whether there are so many sequences with their context now."""
        missing = sessions - len(self._sequences)
        if missing <= 0:
            return True
        context = min(CONTEXT, self._engine.model.max_length - 1)
        capacity = context + -(-self._most_tokens // sessions)
        fits = missing * -(-capacity // self._engine.block_size) <= self._engine.blocks_free
        if not fits or not self._affordable(missing * context, missing):
            return False
        for _ in range(missing):
            self._sequences.append(begin_unshared(self._engine, capacity))
        segments = [Segment(each, [TOKEN] * context, want_logits=False) for each in self._sequences[-missing:]]
        self._engine.forward(segments)
        for segment in segments:
            self._engine.keep(segment, [])
        return True

    def record(self, tokens: int, sessions: int) -> None:
        durations: list[float] = []
        while len(durations) < REPEATS and self._affordable(tokens, sessions):
            durations.append(self._duration(_step(self._sequences[:sessions], tokens)))
        if durations:
            self._curve.record(tokens, sessions, durations)

    def close(self) -> None:
        for sequence in self._sequences:
            self._engine.close(sequence)

    def _affordable(self, tokens: int, sessions: int) -> bool:
        return self._clock() + self._curve.seconds(tokens, sessions) <= self._end

    def _duration(self, segments: list[Segment]) -> float:
        started = self._clock()
        # Reading a number waits for a device that computes on its own.
        self._engine.forward(segments).logits[0, 0].item()
        return self._clock() - started


def _step(sequences: list[Sequence], tokens: int) -> list[Segment]:
    """One committed token per sequence, and trees of candidates that fill the step up."""
    segments: list[Segment] = []
    for index, sequence in enumerate(sequences):
        nodes = (tokens - index - 1) // len(sequences)
        parents = [node - 1 if node % BRANCH else -1 for node in range(nodes)]
        segments.append(Segment(sequence, [TOKEN], [TOKEN] * nodes, parents))
    return segments
