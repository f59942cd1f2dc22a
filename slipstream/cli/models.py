"""`slipstream train`: a small target and its distilled drafter, from scratch, on one CPU core."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import explained
from slipstream.runtime_tuning import ALLOCATOR


def train(
    out: Annotated[Path, typer.Option(help="Folder that gets target/, draft/ and README.md.")] = Path("models"),
    minutes: Annotated[float, typer.Option(help="Wall time for the target.")] = 60.0,
    draft_minutes: Annotated[float, typer.Option(help="Wall time for the drafter.")] = 20.0,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of .py files to learn from; the standard library if not given.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path(".cache/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in the cache folder.")] = False,
    steps: Annotated[int | None, typer.Option(help="Exact steps for the target instead of minutes.")] = None,
    draft_steps: Annotated[int | None, typer.Option(help="Exact steps for the drafter instead of minutes.")] = None,
    start: Annotated[
        Path | None, typer.Option(help="Folder of an earlier pair to start from; missing layers start silent.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides initial weights and the order of the data.")] = 17,
    threads: Annotated[int, typer.Option(help="CPU threads to use.")] = 1,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="1.3x faster; by default if there is a C++ compiler.")
    ] = None,
) -> None:
    """Train a target and distil its drafter, evaluate both on held-out files, and write the models."""
    _with_allocator(threads)
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
    typer.echo(
        f"{out}: held-out loss {found.target_loss:.3f} / {found.draft_loss:.3f} nats per token, "
        f"greedy agreement {found.greedy_agreement:.3f}, 1 - TV {found.overlap:.3f}, coupled {found.coupled:.3f}"
    )


def _length(stage: str, minutes: float, steps: int | None) -> str:
    return f"--{stage}minutes {minutes:g}" if steps is None else f"--{stage}steps {steps}"


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "c++", "clang++"))


def _with_allocator(threads: int) -> None:
    """Start this process again with the allocator's settings, which are read only once, at its start."""
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": str(threads)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
