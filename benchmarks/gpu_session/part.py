"""One part's figures as JSON in FILE.

usage: python -m benchmarks.gpu_session.part NAME FILE [--device cuda|cpu] [--small]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.gpu_session import draft_loop, launch_times, products, sampling
from benchmarks.gpu_session.timing import Bench

MEASURES = {
    "launch_times": launch_times.measure,
    "sampling": sampling.measure,
    "draft_loop": draft_loop.measure,
    "products": products.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_session.part")
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    figures = MEASURES[options.name](Bench(torch.device(options.device), options.small))
    options.file.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
