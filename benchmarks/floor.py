"""A pass of the target beside its memory floor: reading every weight once, as fast as these cores read.

usage: python -m benchmarks.floor [THREADS] [REPEATS]     (default: all cores of this process, 15)

The target inflated to 300 M parameters, one and eight tokens after 256 tokens of context. The floor of a way of keeping
weights is timed on this machine: a sum over as many bytes as its weights have, in memory of its own. Floors and passes
take turns, and ratios are medians over the turns. Threads sleep between calls, as those of a role do. `fp32, ms` is the
time of a pass's multiplications in float32 with numbers from the caches (a product of torch). With one thread times are
CPU of that thread: other work on the cores is not in them, but for memory's bandwidth, which all share.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from safetensors import safe_open

from benchmarks.forward import KV_TOKENS, Pass, engine_pass
from benchmarks.peers.disturbance import Watch
from benchmarks.processes import INFLATED, inflate
from benchmarks.records import Row, write
from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.torch_engine import TorchEngine
from slipstream.process import PATIENT_THREADS

SIZES = (1, 8)
WAYS = (("float32", ""), ("bfloat16", ""), ("bfloat16", "int8"), ("float32", "int8-dynamic"))
"""dtype and quantisation."""
BYTES = {"float32": 4.0, "bfloat16": 2.0}
AIMS = {1: 1.15, 8: 1.4}
"""Times the floor that a pass may take at most, by tokens."""


def weight_bytes(dtype: str, quantisation: str) -> tuple[int, int]:
    """What a pass reads of the weights, linear layers and the output head: their number, and bytes. int8 keeps the head
    as `dtype` says."""
    with safe_open(INFLATED / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in [*file.keys()]}
    layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    head = math.prod(shapes["model.embed_tokens.weight"])  # it is the output head too
    kept = 1.0 if quantisation else BYTES[dtype]
    return layers + head, int(layers * kept + head * (1.0 if quantisation == "int8-dynamic" else BYTES[dtype]))


def reading(size: int, device: str = "cpu") -> Callable[[], None]:
    """Reads so many bytes of the device's memory."""
    memory = torch.ones(size // 4, dtype=torch.float32, device=device)

    def read() -> None:
        memory.sum()

    return read


def multiplications_per_s(clock: Callable[[], float]) -> float:
    """In float32, of numbers in the caches."""
    size, times = 384, list[float]()
    matrix = torch.ones(size, size)
    for _ in range(30):
        begun = clock()
        torch.mm(matrix, matrix)
        times.append(clock() - begun)
    return size**3 / statistics.median(times)


@torch.inference_mode()
def measure(dtype: str, quantisation: str, repeats: int, clock: Callable[[], float]) -> list[Row]:
    weights, size = weight_bytes(dtype, quantisation)
    floor = reading(size)
    checkpoint = load_checkpoint(str(INFLATED), dtype, quantisation=quantisation)
    run: Pass = engine_pass(TorchEngine(checkpoint, KV_TOKENS))
    rate = multiplications_per_s(clock)
    watch, floors, passes = Watch(), list[float](), {tokens: list[float]() for tokens in SIZES}
    for repeat in range(-2, repeats):
        begun = clock()
        floor()
        floors.append(clock() - begun)
        for tokens, times in passes.items():
            begun = clock()
            run(tokens)
            times.append(clock() - begun)
        if repeat < 0:  # warm-up
            for times in (floors, *passes.values()):
                times.clear()
    seen = watch.seen()
    rows: list[Row] = []
    for tokens, times in passes.items():
        ratio = statistics.median(taken / least for taken, least in zip(times, floors, strict=True))
        rows.append(
            {
                "weights": f"{dtype} {quantisation}".strip(),
                "tokens": tokens,
                "MB": size / 1e6,
                "floor, ms": 1e3 * statistics.median(floors),
                "GB / s": size / 1e9 / statistics.median(floors),
                "pass, ms": 1e3 * statistics.median(times),
                "pass / floor": ratio,
                "fp32, ms": 1e3 * tokens * weights / rate,
                "aim": AIMS[tokens],
                "steal_percent": seen.steal,
                "others_percent": seen.others,
            }
        )
    return rows


def main(threads: int, repeats: int) -> None:
    torch.set_num_threads(threads)
    inflate()
    clock = time.thread_time if threads == 1 else time.perf_counter
    rows = [row for dtype, quantisation in WAYS for row in measure(dtype, quantisation, repeats, clock)]
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    write(f"floor_{threads}_{instructions}", f"python -m benchmarks.floor {threads} {repeats}", rows)


if __name__ == "__main__":
    if not PATIENT_THREADS.keys() <= os.environ.keys():  # read when OpenMP begins
        os.execve(sys.executable, sys.orig_argv, os.environ | PATIENT_THREADS)
    main(threads_for(int(sys.argv[1]) if sys.argv[1:] else 0), int(sys.argv[2]) if sys.argv[2:] else 15)
