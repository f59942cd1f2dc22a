"""`slipstream train`: drafters for a target of yours, or a small target with its drafter from nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import AsJson, expanded, explained, need_installed
from slipstream.process import ALLOCATOR
from training.inflate.cli import inflate

if TYPE_CHECKING:
    from training.settings import Settings

BUDGET, FILES = "Time and threads", "Files"
"""Groups of options in `--help`."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells count it."""
train_app = typer.Typer(help="Train drafters for a target of yours; without a subcommand, a small pair from nothing.")


@dataclass(frozen=True)
class PairFiles:
    """Options of `train` that name files."""

    out: Annotated[
        Path, typer.Option(help="Output folder for target/, draft/ and README.md.", rich_help_panel=FILES)
    ] = Path("models")
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of .py files to train on; default: the standard library.", rich_help_panel=FILES),
    ] = None
    cache: Annotated[Path, typer.Option(help="Folder for checkpoints.", rich_help_panel=FILES)] = Path(".cache/train")
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoints in the cache folder.", rich_help_panel=FILES)
    ] = False
    start: Annotated[
        Path | None,
        typer.Option(
            help="Folder of an earlier pair to start from; added layers start as identity.", rich_help_panel=FILES
        ),
    ] = None


@dataclass(frozen=True)
class PairBudget:
    """Options of `train` for the time that it takes."""

    minutes: Annotated[float, typer.Option(help="Wall time for the target.", rich_help_panel=BUDGET)] = 60.0
    draft_minutes: Annotated[float, typer.Option(help="Wall time for the drafter.", rich_help_panel=BUDGET)] = 20.0
    steps: Annotated[
        int | None, typer.Option(help="Exact steps for the target instead of minutes.", rich_help_panel=BUDGET)
    ] = None
    draft_steps: Annotated[
        int | None, typer.Option(help="Exact steps for the drafter instead of minutes.", rich_help_panel=BUDGET)
    ] = None
    threads: Annotated[int, typer.Option(help="CPU threads to use.", rich_help_panel=BUDGET)] = 1
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the model (1.3x faster); default: where there is a C++ compiler.",
            rich_help_panel=BUDGET,
        ),
    ] = None

    @property
    def lengths(self) -> str:
        """The options that decide what comes out."""
        target, draft = (self.minutes, self.steps), (self.draft_minutes, self.draft_steps)
        return f"{_length('', *target)} {_length('draft-', *draft)}"

    def settings(self, seed: int, *, trained: bool) -> Settings:
        """`trained`: the target starts from trained weights."""
        from training.settings import DRAFT, TARGET, Budget, Optimisation, Schedule, Settings, TrainingStage

        schedule = Schedule(peak=0.4) if trained else Schedule()
        return Settings(
            target=TrainingStage("target", TARGET, Budget(self.minutes, self.steps), schedule=schedule),
            # A small model learns more from many small steps, and at a higher rate.
            draft=TrainingStage(
                "draft",
                DRAFT,
                Budget(self.draft_minutes, self.draft_steps),
                rows=4,
                optimisation=Optimisation(adam_rate=1e-2),
            ),
            seed=seed,
            compiled=_has_compiler() if self.compiled is None else self.compiled,
        )


@train_app.callback(invoke_without_command=True)
@expanded
def train_pair(
    *,
    context: typer.Context,
    files: PairFiles,
    budget: PairBudget,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order of the data.")] = 17,
    as_json: AsJson = False,
) -> None:
    """Train a target, distil its drafter, evaluate both on held-out files, and write the models; with a subcommand,
    a drafter for your own target."""
    if context.invoked_subcommand is not None:
        return
    _with_allocator(budget.threads)
    with explained("train"):
        need_installed("torch", "transformers")
    _prepare(budget.threads)
    from training.corpus import read_corpus
    from training.session import TrainingFolders, TrainingSession

    settings = budget.settings(seed, trained=files.start is not None)
    command = f"slipstream train {budget.lengths} --seed {seed}" + (
        f" --start {files.start.name}" if files.start else ""
    )
    with explained("train"):
        folders = TrainingFolders(files.out, files.cache, files.resume, files.start)
        found = TrainingSession(settings, read_corpus(files.corpus), folders).run(command).evaluation
    if as_json:
        typer.echo(json.dumps({"out": str(files.out)} | asdict(found)))
        return
    typer.echo(
        f"{files.out}: held-out loss {found.target_loss:.3f} / {found.draft_loss:.3f} nats per token, "
        f"greedy agreement {found.greedy_agreement:.3f}, 1 - TV {found.overlap:.3f}, coupled {found.coupled:.3f}"
    )


def _prepare(threads: int) -> None:
    """Threads of torch, and no output of libraries."""
    from slipstream.engine.models.quantisation import silence_quantiser_logs

    silence_quantiser_logs()
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    disable_progress_bar()


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


Config = Annotated[
    Path | None, typer.Option(help="TOML file of settings; other options override it.", rich_help_panel=FILES)
]
Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target.", rich_help_panel=FILES)]
Data = Annotated[
    str | None,
    typer.Option(
        help="Folder of texts, JSONL, or a file with one prompt in each line; default: the standard library.",
        rich_help_panel=FILES,
    ),
]
HeadOut = Annotated[
    str | None,
    typer.Option("--out", help="Folder for the drafter; checkpoints and report stand beside.", rich_help_panel=FILES),
]
Steps = Annotated[
    int | None, typer.Option(help="Training steps; a resumed run may have more.", min=1, rich_help_panel=BUDGET)
]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Minutes of training in place of steps; a resumed run may have more.", min=0.0, rich_help_panel=BUDGET
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads to use.", rich_help_panel=BUDGET)]
Device = Annotated[
    str | None,
    typer.Option(help="auto (the first GPU, else the CPU), cpu, cuda or cuda:N.", rich_help_panel=BUDGET),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.", rich_help_panel=FILES)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print sizes, memory and time, and train nothing.")]


def _command_to_go_on() -> str:
    """This command, in a shell's words, with `--resume`."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["slipstream", *words, "--resume"])


def _drafter_command(kind: str, about: str) -> None:
    def train_drafter(
        config: Config = None,
        target: Target = None,
        data: Data = None,
        out: HeadOut = None,
        steps: Steps = None,
        minutes: Minutes = None,
        seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and answers.")] = None,
        device: Device = None,
        threads: Threads = 1,
        resume: Resume = False,
        dry_run: DryRun = False,
        as_json: AsJson = False,
    ) -> None:
        options = {"target": target, "data": data, "out": out, "steps": steps, "minutes": minutes, "seed": seed,
                   "device": device}  # fmt: skip
        _with_allocator(threads)
        with explained(f"train {kind}"):
            need_installed("torch", "transformers")
            result = _train_drafter(kind, config, options, threads, resume=resume, dry_run=dry_run)
        typer.echo(json.dumps(result) if as_json else "\n".join(f"{name}: {value}" for name, value in result.items()))

    train_drafter.__doc__ = about
    train_app.command(kind)(train_drafter)


def _train_drafter(
    kind: str, config: Path | None, options: dict[str, Any], threads: int, *, resume: bool, dry_run: bool
) -> dict[str, Any]:
    """Trains a drafter. Returns the text to print."""
    from slipstream.tokenizer.vocabulary import check_folder
    from training.request import read_request

    request = read_request(kind, config, options)
    check_folder(request.target)  # before torch, which takes seconds to import
    _prepare(threads)
    from training.plan import TrainingPlanner
    from training.run import TrainingRun

    run = TrainingRun(request)
    if dry_run:
        planned = TrainingPlanner(run).estimate()
        return asdict(planned) | {"seconds": planned.seconds, "summary": planned.summary(request.rows)}
    try:
        report = run.run(resume=resume)
    except KeyboardInterrupt:
        typer.echo(
            f"Stopped; {request.workplace} has all that was done. To go on:\n    {_command_to_go_on()}", err=True
        )
        raise typer.Exit(INTERRUPTED) from None
    return {
        "out": request.out,
        "report": str(request.workplace / "report.html"),
        "step": report.step,
        "by_depth": [round(share, 3) for share in report.whole.by_depth],
        "tokens_a_round": {size: round(length, 3) for size, length in report.whole.lengths.items()},
        "ships": report.ships,
        "verdict": report.verdict,
    }


_drafter_command("draft", "Distil a draft model from a target of yours: on its own answers, KL, then TV or LK.")
_drafter_command("medusa", "Train Medusa heads for a target of yours.")
_drafter_command("eagle", "Train an EAGLE head for a target of yours, with EAGLE-3's training-time test.")


def add_commands(app: typer.Typer) -> None:
    app.add_typer(train_app, name="train")
    app.command()(expanded(inflate))
