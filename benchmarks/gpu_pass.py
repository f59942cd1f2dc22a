"""A pass of the embedded engine on a GPU, beside its memory floor and transformers' own.

usage: python -m benchmarks.gpu_pass [PARAMETERS] [REPEATS]     (default: 3B 30)

The shipped target inflated to so many parameters, after 256 tokens of context; sessions x tokens. The floor is the time
in which this GPU reads as many bytes as the weights have, by a sum over memory of its own. Passes are timed on the host
from their call to the end of the GPU's work, in changing order; medians. `enqueued` is the part in which the host gave
the GPU its work: where it is nearly all, the pass is bound by launches and not by the GPU. Transformers computes one
session, with its own cache.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.floor import reading
from benchmarks.forward import CONTEXT, DTYPES, chain, fill, plain_pass
from benchmarks.processes import gpu, inflated
from benchmarks.records import Row, in_a_name, write
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.torch_engine import TorchEngine

SHAPES = ((1, 1), (1, 4), (1, 8), (1, 16), (1, 64), (8, 1), (8, 8), (32, 1), (32, 4), (64, 1), (64, 4))
"""Sessions and tokens of each."""
MOST_SESSIONS, MOST_TOKENS = (max(column) for column in zip(*SHAPES, strict=True))


def engine_passes(engine: TorchEngine) -> Callable[[int, int], None]:
    sequences = [engine.kv.begin_unshared(CONTEXT + MOST_TOKENS) for _ in range(MOST_SESSIONS)]
    for sequence in sequences:
        fill(engine, sequence, CONTEXT)

    def run(sessions: int, tokens: int) -> None:
        engine.forward([chain(sequence, tokens) for sequence in sequences[:sessions]])

    return run


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds until the GPU has done it, and until the host had given it to the GPU."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    given = time.perf_counter()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, given - begun


@torch.inference_mode()
def measure(folder: Path, dtype: str, repeats: int) -> list[Row]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    library = plain_pass(model.eval().to("cuda"))
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    checkpoint = load_checkpoint(str(folder), dtype, "cuda:0")
    run = engine_passes(TorchEngine(checkpoint, MOST_SESSIONS * (CONTEXT + 2 * MOST_TOKENS)))
    read = reading(size, "cuda")
    floor = statistics.median(timed(read)[0] for _ in range(repeats))
    ways: dict[tuple[int, int, bool], Callable[[], None]] = {}
    for sessions, tokens in SHAPES:
        ways[sessions, tokens, True] = partial(run, sessions, tokens)
        if sessions == 1:
            ways[sessions, tokens, False] = partial(library, tokens)
    taken: dict[tuple[int, int, bool], list[tuple[float, float]]] = {way: [] for way in ways}
    order = random.Random(0)
    for repeat in range(-3, repeats):
        for way in order.sample(list(ways), len(ways)):
            seconds = timed(ways[way])
            if repeat >= 0:
                taken[way].append(seconds)
    rows: list[Row] = []
    for sessions, tokens in SHAPES:
        whole, given = (statistics.median(each) for each in zip(*taken[sessions, tokens, True], strict=True))
        other = taken.get((sessions, tokens, False))
        rows.append(
            {
                "dtype": dtype,
                "GB": size / 1e9,
                "sessions x tokens": f"{sessions} x {tokens}",
                "floor, ms": 1e3 * floor,
                "pass, ms": 1e3 * whole,
                "enqueued, ms": 1e3 * given,
                "transformers, ms": 1e3 * statistics.median(each for each, _ in other) if other else None,
            }
        )
    return rows


def main(parameters: str, repeats: int) -> None:
    folder = inflated(parameters)
    rows = [row for dtype in DTYPES for row in measure(folder, dtype, repeats)]
    command = f"python -m benchmarks.gpu_pass {parameters} {repeats}"
    write(f"gpu_pass_{parameters.lower()}_{in_a_name(gpu())}", command, rows)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "3B", int(sys.argv[2]) if sys.argv[2:] else 30)
