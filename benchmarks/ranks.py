"""What a step costs on one rank and on two, and what its broadcast to the other rank costs.

usage: python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.ranks [FOLDER]

fp32 on the CPU, one thread a rank, both ways in turn. A step has so many sessions, each with 8 candidates on 128 tokens
of context (or one prompt of 512 tokens). The message is timed alone: encoding it on the leader, and the broadcast until
the leader may go on. Medians of 30.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.processes import MODELS
from benchmarks.records import Row, write
from slipstream.engine.engine import begin_unshared
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.spread import Spread
from slipstream.engine.segment import Segment
from slipstream.engine.tensor_parallel.broadcast import MAGIC, BroadcastStep, Kind, encode_step
from slipstream.engine.tensor_parallel.group import LEADER, Rank
from slipstream.engine.tensor_parallel.parallel import FollowingEngine, GroupTimeouts, LeadingEngine, Line, join
from slipstream.engine.torch_engine import TorchEngine

REPEATS = 30
CONTEXT, NODES, PROMPT = 128, 8, 512
SESSIONS = (1, 4, 16, 64)
KV_TOKENS = 16_384
COMMAND = "python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.ranks"


def decoding(engine: TorchEngine, sessions: int) -> list[Segment]:
    context = [
        Segment(begin_unshared(engine, CONTEXT + NODES + 1), [1] * CONTEXT, want_logits=False) for _ in range(sessions)
    ]
    engine.forward(context)
    for segment in context:
        engine.keep(segment, [])
    parents = list(range(-1, NODES - 1))
    return [Segment(segment.sequence, [2], [3] * NODES, parents) for segment in context]


def reading(engine: TorchEngine) -> list[Segment]:
    return [Segment(begin_unshared(engine, PROMPT), [1] * PROMPT)]


def seconds(*actions: Callable[[], object]) -> list[float]:
    """The median of each, all in turn."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(REPEATS):
        for action, taken in zip(actions, times, strict=True):
            started = time.perf_counter()
            action()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]


def row(name: str, alone: list[Segment], cut: list[Segment], engines: tuple[TorchEngine, TorchEngine, Line]) -> Row:
    one, two, line = engines
    step = BroadcastStep([], cut)
    words = encode_step(step)
    beat = [MAGIC, Kind.BEAT, *words[2:]]  # as long, without any computation
    steps = seconds(lambda: one.forward(alone), lambda: two.forward(cut))
    durations = seconds(lambda: encode_step(step), lambda: line.send(beat))
    for engine, segments in ((one, alone), (two, cut)):
        for segment in segments:
            engine.close(segment.sequence)
    return {
        "step": name,
        "1 rank, ms": steps[0] * 1e3,
        "2 ranks, ms": steps[1] * 1e3,
        "message, bytes": 8 * len(words),
        "encode, us": durations[0] * 1e6,
        "broadcast, us": durations[1] * 1e6,
    }


def main(folder: str) -> None:
    place = Rank.from_environment()
    spread = Spread(ranks=place.size)
    line, checkpoint = join(
        place, GroupTimeouts(600.0, 60.0), lambda _: load_checkpoint(folder, "float32", spread=spread), KV_TOKENS
    )
    if place.rank != LEADER:
        FollowingEngine(checkpoint, KV_TOKENS, line).follow()
        return
    two = LeadingEngine(checkpoint, KV_TOKENS, line)
    one = TorchEngine(load_checkpoint(folder, "float32"), KV_TOKENS)
    rows = [
        row(f"{sessions} sessions", decoding(one, sessions), decoding(two, sessions), (one, two, line))
        for sessions in SESSIONS
    ]
    rows.append(row(f"prompt of {PROMPT}", reading(one), reading(two), (one, two, line)))
    two.end()
    write("ranks", COMMAND, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main(sys.argv[1] if len(sys.argv) > 1 else str(MODELS / "target"))
