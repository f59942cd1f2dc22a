"""A pass of a bf16 checkpoint with its weights in 16 bits and in 12 (kernels/squeeze.h), in turns on one machine.

usage: python -m benchmarks.twelve_bits [TARGET] [THREADS] [REPEATS]     (default: .cache/smollm2, all cores, 40)

Medians of wall time after 256 tokens of context, and of pairs their ratio with its middle half. Ends with status 1 if a
logit differs in one bit, or on a CPU whose products are not of bf16 pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

from benchmarks.forward import BLOCK, KV_TOKENS, chain, fill
from slipstream.engine.kernels import products
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.torch_engine import TorchEngine

CONTEXT = 256
ROWS = (1, 2, 4, 8, 16, 32, 128)
WARM = 3


def engine(target: str, squeezed: bool) -> TorchEngine:
    squeeze = products.squeeze
    if not squeezed:
        products.squeeze = lambda kernels, lines: None
    try:
        return TorchEngine(load_checkpoint(target, "bfloat16"), KV_TOKENS, block_size=BLOCK)
    finally:
        products.squeeze = squeeze


@torch.inference_mode()
def main(target: str, threads: int, repeats: int) -> None:
    kernels = find_kernels()
    if kernels is None or not kernels.multiplies_pairs:
        raise SystemExit("this CPU multiplies no bf16 pairs: weights stay in 16 bits")
    torch.set_num_threads(threads)
    engines = [engine(target, squeezed) for squeezed in (False, True)]
    sequences = [each.kv.begin_unshared(CONTEXT + max(ROWS)) for each in engines]
    for each, sequence in zip(engines, sequences, strict=True):
        fill(each, sequence, CONTEXT)
    print(f"{target}, {threads} threads, {repeats} pairs\n\n| rows | 16 bits, ms | 12 bits, ms | ratio | middle half |")
    print("|---|---|---|---|---|")
    for rows in ROWS:
        times: list[list[float]] = [[], []]
        for turn in range(WARM + repeats):
            logits = []
            for which in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                output = engines[which].forward([chain(sequences[which], rows)])
                times[which].append(1e3 * (time.perf_counter() - began))
                logits.append(output.logits.clone())
            if not torch.equal(*logits):
                raise SystemExit(f"{rows} rows: a logit differs")
        plain, squeezed = (each[WARM:] for each in times)
        ratios = [after / before for before, after in zip(plain, squeezed, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {rows} | {statistics.median(plain):.2f} | {statistics.median(squeezed):.2f} | {middle:.2f} "
            f"| {low:.2f}-{high:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    given = sys.argv[1:] + [".cache/smollm2", str(len(os.sched_getaffinity(0))), "40"][len(sys.argv) - 1 :]
    main(given[0], int(given[1]), int(given[2]))
