"""Many worlds, one for each seed.

usage: python -m tests.simulation [--first SEED] [--seeds COUNT] [--jobs PROCESSES] [--arithmetics 1|2] [--trace]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from functools import partial
from multiprocessing import Pool

import torch

from tests.simulation.controls import TWO
from tests.simulation.storm import storm
from tests.simulation.world import Report, Size, run

AGAIN = "python -m tests.simulation --first {seed} --seeds 1 --trace"


SIZES = {1: Size(), 2: TWO}


def simulate(seed: int, arithmetics: int = 1) -> Report:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # services log much about faults
    return run(seed, storm, SIZES[arithmetics])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--arithmetics", type=int, choices=SIZES, default=1, help="of the verifiers of a world")
    parser.add_argument("--trace", action="store_true", help="print each run's trace digest")
    asked = parser.parse_args()
    again = AGAIN + (f" --arithmetics {asked.arithmetics}" if asked.arithmetics > 1 else "")
    began, seconds, failed, total = time.monotonic(), 0.0, 0, Counter[str]()
    with Pool(asked.jobs) as pool:
        for report in pool.imap(
            partial(simulate, arithmetics=asked.arithmetics), range(asked.first, asked.first + asked.seeds)
        ):
            total += report.counts
            seconds += report.seconds
            if asked.trace:
                print(f"{report.seed} {report.trace}")
            if report.failure:
                failed += 1
                print(f"seed {report.seed}: {report.failure}\n  again: {again.format(seed=report.seed)}", flush=True)
    print(", ".join(f"{what} {count}" for what, count in sorted(total.items())))
    print(f"{asked.seeds} seeds, {failed} failed; {seconds:.0f} virtual seconds in {time.monotonic() - began:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
