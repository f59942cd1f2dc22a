"""`slipstream train`: a small target and its distilled drafter, from scratch, on one CPU core."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

# glibc gives large temporaries back to the kernel at every step by default: page faults took 60 % of the time.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}


def train(  # noqa: PLR0913 - one parameter per option
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
    seed: Annotated[int, typer.Option(help="Decides initial weights and the order of the data.")] = 17,
    threads: Annotated[int, typer.Option(help="CPU threads to use.")] = 1,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Needs a C++ compiler; 1.3x faster.")] = True,
) -> None:
    """Train a target and distil its drafter, evaluate both on held-out files, and write the models."""
    _with_allocator(threads)
    import torch

    from slipstream.training.corpus import read_corpus
    from slipstream.training.session import Places, TrainingSession
    from slipstream.training.settings import DRAFT, TARGET, Budget, Settings, Stage

    torch.set_num_threads(threads)
    settings = Settings(
        target=Stage("target", TARGET, Budget(minutes, steps)),
        draft=Stage("draft", DRAFT, Budget(draft_minutes, draft_steps)),
        seed=seed,
        compiled=compiled,
    )
    session = TrainingSession(settings, read_corpus(corpus), Places(out, cache, resume))
    session.run(f"slipstream train --minutes {minutes:g} --draft-minutes {draft_minutes:g} --seed {seed}")


def _with_allocator(threads: int) -> None:
    """Start this process again with the allocator's settings, which are read only once, at its start."""
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": str(threads)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
