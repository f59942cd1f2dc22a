"""usage: python -m benchmarks.gpu_session OUT [--device cuda|cpu] [--small] [--only PART ...] [--seconds S]

OUT is a folder. Ends with status 1 if a part failed or took too long; parts that this machine lacks something for are
left out, with the reason on the page.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, gpu

MEASURED = "benchmarks.gpu_session.part"
PAGE = "page.md"
LAST_LINES = 12
"""Of a part's output, on the page."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    limit_s: float
    command: tuple[str, ...]
    needs_gpu: bool = True
    needs: str = ""
    """A package without which it is left out."""


PARTS = (
    Part("launch_times", 45, (MEASURED, "launch_times"), needs_gpu=False),
    Part("sampling", 60, (MEASURED, "sampling"), needs_gpu=False, needs="triton"),
    Part("draft_loop", 120, (MEASURED, "draft_loop"), needs_gpu=False),
    Part("products", 45, (MEASURED, "products"), needs_gpu=False),
    Part("passes", 90, ("benchmarks.gpu_pass", "3B", "10")),
    Part("promises", 90, ("pytest", "-q", "-x", "tests/gpu")),
    Part("system", 90, ("benchmarks.load", "inflated", "3")),
    Part("vllm", 150, ("pytest", "-q", "-x", "tests/vllm/test_executor.py", "tests/vllm/test_graphs.py"), needs="vllm"),
)
"""In the order of what is wanted most: some ten minutes in all, so that a part can be run again within fifteen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    part: Part
    state: str
    """`done`, `failed`, `too long`, or why it was left out."""
    seconds: float = 0.0
    output: str = ""

    @property
    def bad(self) -> bool:
        return self.state in ("failed", "too long")


def run(part: Part, out: Path, device: str, small: bool) -> Outcome:
    """Runs it as a process of its own, which is killed at its limit with all that it wrote until then kept."""
    if part.needs_gpu and device == "cpu":
        return Outcome(part, "left out: it needs a GPU")
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return Outcome(part, f"left out: {part.needs} is not installed")
    command = [sys.executable, "-m", *part.command]
    if part.command[0] == MEASURED:
        command += [str(out / f"{part.name}.json"), "--device", device, *(["--small"] if small else [])]
    log, began = out / f"{part.name}.log", time.monotonic()
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=part.limit_s, check=False
            )
            state = "failed" if done.returncode else "done"
        except subprocess.TimeoutExpired:
            state = "too long"
    lines = log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:]
    return Outcome(part, state, time.monotonic() - began, "\n".join(lines))


def page(outcomes: Sequence[Outcome], out: Path) -> str:
    lines = [f"# A session on {gpu() or 'a CPU: no figure here says anything'}", ""]
    for each in outcomes:
        lines += [f"## {each.part.name}: {each.state}, {each.seconds:.0f} s", ""]
        file = out / f"{each.part.name}.json"
        if file.exists():
            figures = json.loads(file.read_text())
            lines += ["| | |", "|---|---|", *(f"| {name} | {shown(value)} |" for name, value in figures.items()), ""]
        elif each.output:
            lines += ["```", each.output, "```", ""]
    return "\n".join(lines)


def shown(value: float | int | bool | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_session")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--seconds", type=float, default=600.0, help="parts that would begin later are left out")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes, ends = [], time.monotonic() + options.seconds
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        if time.monotonic() > ends:
            outcomes.append(Outcome(part, "left out: no time was left"))
        else:
            outcomes.append(run(part, options.out, options.device, options.small))
        print(f"{part.name}: {outcomes[-1].state}, {outcomes[-1].seconds:.0f} s", flush=True)
        (options.out / PAGE).write_text(page(outcomes, options.out))
    return int(any(each.bad for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
