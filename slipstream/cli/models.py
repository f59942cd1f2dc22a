"""`slipstream train` and `inflate`: a small target with its distilled drafter, and a model inflated in size."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import AsJson, explained, need_installed
from slipstream.process import ALLOCATOR

BUDGET, FILES = "Time and threads", "Files"
"""Groups of options in `--help`."""
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def train(
    out: Annotated[
        Path, typer.Option(help="Output folder for target/, draft/ and README.md.", rich_help_panel=FILES)
    ] = Path("models"),
    minutes: Annotated[float, typer.Option(help="Wall time for the target.", rich_help_panel=BUDGET)] = 60.0,
    draft_minutes: Annotated[float, typer.Option(help="Wall time for the drafter.", rich_help_panel=BUDGET)] = 20.0,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of .py files to train on; default: the standard library.", rich_help_panel=FILES),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder for checkpoints.", rich_help_panel=FILES)] = Path(".cache/train"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoints in the cache folder.", rich_help_panel=FILES)
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Exact steps for the target instead of minutes.", rich_help_panel=BUDGET)
    ] = None,
    draft_steps: Annotated[
        int | None, typer.Option(help="Exact steps for the drafter instead of minutes.", rich_help_panel=BUDGET)
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Folder of an earlier pair to start from; added layers start as identity.", rich_help_panel=FILES
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order of the data.")] = 17,
    threads: Annotated[int, typer.Option(help="CPU threads to use.", rich_help_panel=BUDGET)] = 1,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the model (1.3x faster); default: where there is a C++ compiler.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a target, distil its drafter, evaluate both on held-out files, and write the models."""
    _with_allocator(threads)
    with explained("train"):
        need_installed("torch", "transformers")
    from slipstream.engine.models.quantisation import silence_quantiser_logs

    silence_quantiser_logs()
    import torch
    from transformers.utils.logging import disable_progress_bar

    from training.corpus import read_corpus
    from training.session import TrainingFolders, TrainingSession
    from training.settings import DRAFT, TARGET, Budget, Optimisation, Schedule, Settings, TrainingStage

    torch.set_num_threads(threads)
    schedule = Schedule() if start is None else Schedule(peak=0.4)
    settings = Settings(
        target=TrainingStage("target", TARGET, Budget(minutes, steps), schedule=schedule),
        # A small model learns more from many small steps, and at a higher rate.
        draft=TrainingStage(
            "draft", DRAFT, Budget(draft_minutes, draft_steps), rows=4, optimisation=Optimisation(adam_rate=1e-2)
        ),
        seed=seed,
        compiled=_has_compiler() if compiled is None else compiled,
    )
    disable_progress_bar()
    lengths = f"{_length('', minutes, steps)} {_length('draft-', draft_minutes, draft_steps)}"
    command = f"slipstream train {lengths} --seed {seed}" + (f" --start {start.name}" if start else "")
    with explained("train"):
        session = TrainingSession(settings, read_corpus(corpus), TrainingFolders(out, cache, resume, start))
        found = session.run(command).evaluation
    if as_json:
        typer.echo(json.dumps({"out": str(out)} | asdict(found)))
        return
    typer.echo(
        f"{out}: held-out loss {found.target_loss:.3f} / {found.draft_loss:.3f} nats per token, "
        f"greedy agreement {found.greedy_agreement:.3f}, 1 - TV {found.overlap:.3f}, coupled {found.coupled:.3f}"
    )


def _length(stage: str, minutes: float, steps: int | None) -> str:
    return f"--{stage}minutes {minutes:g}" if steps is None else f"--{stage}steps {steps}"


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "c++", "clang++"))


def _with_allocator(threads: int) -> None:
    """Restarts this process with the allocator's settings: glibc reads them only at the start."""
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": str(threads)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def inflate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a Llama, Mistral or Qwen checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder for the inflated checkpoint.")],
    parameters: Annotated[str, typer.Option(help="Approximate size, e.g. 300M or 1.5B.")] = "300M",
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size: the checkpoint's own times 1, 2, 4, 8 or 16.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the added random weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a larger model that computes the same function, to measure serving with a small trained pair."""
    with explained("inflate"):
        need_installed("torch", "transformers")
    from rich.console import Console
    from rich.progress import Progress

    from training.inflate.inflate import inflate as write_inflated
    from training.inflate.proportions import InflateRequest

    console = Console(stderr=True)
    with explained("inflate"):
        request = InflateRequest(parse_count(parameters), hidden, layers, seed)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"inflating {checkpoint.name}")
            shape = write_inflated(
                checkpoint, out, request, lambda done, total: bar.update(task, completed=done, total=total)
            )
    if as_json:
        typer.echo(json.dumps({"out": str(out), "parameters": shape.parameters()} | asdict(shape)))
        return
    console.print(
        f"{out}: {shape.parameters() / 1e6:.0f} M parameters, hidden {shape.hidden}, {shape.layers} layers, "
        f"{shape.heads}/{shape.kv_heads} heads, MLP {shape.feed_forward}",
        soft_wrap=True,
        highlight=False,
    )


def parse_count(text: str) -> int:
    """`300M` -> 300000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of parameters; write for example 300M.")
    return round(float(match[1]) * COUNT_UNITS[match[2]])
