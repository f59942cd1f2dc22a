"""A run of `slipstream train draft`, `medusa` or `eagle`: texts, training, the best checkpoint, export, report."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.devices import find_device
from slipstream.errors import FailedPrecondition
from training.acceptance import SIZES, Ranks, SimulatedAcceptance, measure_ranks, simulate
from training.answers import AT_ONCE
from training.corpus import TrainingBatch
from training.draft import DraftModel
from training.eagle import Eagle, layers_read
from training.medusa import Medusa
from training.report import Report, write_report
from training.request import TrainRequest
from training.samples import SampleMaker
from training.speed import measure_speed
from training.split_model import ModuleLearner
from training.target import Target, TargetStates
from training.texts import Samples
from training.trained_drafter import TrainedDrafter
from training.trainer import CheckpointPolicy, LossFunction, Position, Trainer, TrainingCheckpoint

MAY_CHANGE = ("out", "checkpoint_minutes", "device", "steps", "minutes", "answer_minutes")
"""Settings that may differ in a resumed run."""
CALIBRATED_ROWS = 128
"""Rows that give a fresh drafter its start."""
KV_TOKENS = 8192
"""Least KV room of the target: a pass over texts, and some."""


@dataclass(frozen=True)
class ReadBatch(TrainingBatch):
    """The data of a step with the target's states of it."""

    states: TargetStates | None = None


class TrainingRun:
    """Opens the target; what it makes depends on the request alone."""

    def __init__(self, request: TrainRequest) -> None:
        """Raises FailedPrecondition for an `out` that cannot be written, before the target is loaded."""
        check_out(Path(request.out))
        self.request = request
        self.device = find_device(request.device)
        at_once = request.answers_at_once or AT_ONCE[self.device.type]
        room = at_once * (2 * request.prompt_tokens + request.answer_tokens)
        self.target = Target(request.target, self.device, max(KV_TOKENS, room), request.dtype)

    def run(self, *, resume: bool) -> Report:
        """Trains, exports the best checkpoint to `out` and writes `report.html` beside it. Raises FailedPrecondition
        where checkpoints are of another request, and what reading the data raises."""
        request = self.request
        maker = SampleMaker(request, self.target, layers_read(request, self.target))
        samples = maker.make()
        drafter = open_drafter(request, self.target, samples.frequency(self.target.vocabulary))
        drafter.calibrate(*maker.batch(samples.pick(0, CALIBRATED_ROWS, request.seed)))
        learner = ModuleLearner(drafter.module)
        same = {name: value for name, value in asdict(request).items() if name not in MAY_CHANGE}
        best = _BestCheckpoint(request, repr(same), learner)

        def ranks() -> list[Ranks]:
            with self.autocast():
                return measure_ranks(drafter, maker, samples.held_out)

        def observe(position: Position) -> str:
            if position.step % request.evaluate_steps == 0 or position.finished:
                best.add(position, simulate(ranks()))
            return _finding(position)

        policy = CheckpointPolicy(request.workplace / "last.pt", repr(same), request.checkpoint_minutes, resume)
        trainer = Trainer(request, learner, lambda used, step: self._batch(maker, samples, used, step))
        position = trainer.run(self.loss_of(drafter), policy, observe)
        step = best.restore()
        texts = ranks()
        found, names = simulate(texts), [each.workload for each in samples.held_out]
        drafter.save(Path(request.out), [[round(share, 4) for share in row] for row in found.table])
        report = Report(
            request=request,
            position=position,
            step=step,
            whole=found,
            workloads={
                name: simulate([text for text, of in zip(texts, names, strict=True) if of == name])
                for name in sorted(set(names))
            },
            speed=measure_speed(self.target.engine, drafter, self.device),
            layout=drafter.layout,
            looping=samples.looping,
        )
        write_report(report, request.workplace / "report.html")
        return report

    def _batch(self, maker: SampleMaker, samples: Samples, used: float, step: int) -> TrainingBatch:
        batch, states = maker.batch(samples.pick(step, self.request.rows, self.request.seed))
        return ReadBatch(batch.tokens, batch.learned, used, states)

    def loss_of(self, drafter: TrainedDrafter) -> LossFunction:
        def loss_of(_: Any, batch: TrainingBatch) -> torch.Tensor:
            assert isinstance(batch, ReadBatch) and batch.states is not None
            with self.autocast():
                return drafter.loss(batch, batch.states)

        return loss_of

    def autocast(self) -> AbstractContextManager[Any]:
        """Products in the type that the target is computed in."""
        return torch.autocast(self.device.type, self.target.dtype, enabled=self.target.dtype != torch.float32)


def check_out(out: Path) -> None:
    """Raises FailedPrecondition where `out` cannot be made or replaced, or holds something else than a drafter."""
    if out.exists() and not out.is_dir():
        raise FailedPrecondition(f"--out {out} is a file; give a folder for the drafter.", reason="OUT_UNFIT")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise FailedPrecondition(
            f"--out {out} holds files and no drafter; it would be replaced as a whole. Give another folder.",
            reason="OUT_UNFIT",
        )
    above = next(each for each in out.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise FailedPrecondition(f"--out {out} cannot be made: {above} is not to be written.", reason="OUT_UNFIT")


class _BestCheckpoint:
    """A run's checkpoint of the largest simulated acceptance length."""

    def __init__(self, request: TrainRequest, key: str, learner: ModuleLearner) -> None:
        self._path, self._key, self._learner = request.workplace / "best.pt", key, learner
        self._size = max(size for size in SIZES if size <= request.tree_nodes)

    def add(self, position: Position, found: SimulatedAcceptance) -> None:
        length = found.lengths[self._size]
        if all(length > each["length"] for each in position.evaluations):
            masters = [master.detach() for master in self._learner.masters]
            TrainingCheckpoint(self._key, Position(position.step), masters, []).save(self._path)
        position.evaluations.append({"step": position.step, "length": length, "by_depth": found.by_depth})

    def restore(self) -> int:
        """Its step."""
        kept = TrainingCheckpoint.load(self._path, self._key)
        assert kept is not None, "the last step of a run is measured"
        self._learner.restore(kept.masters)
        return kept.position.step


def _finding(position: Position) -> str:
    if not position.evaluations:
        return ""
    last = position.evaluations[-1]
    depths = " ".join(f"{share:.2f}" for share in last["by_depth"])
    return f"{last['length']:.2f} tokens a round, accepted by depth {depths}"


def open_drafter(request: TrainRequest, target: Target, frequency: torch.Tensor) -> TrainedDrafter:
    """A fresh one of the request's kind; `frequency` int64 [vocabulary]: how often tokens are learned. Raises
    InvalidArgument or FailedPrecondition for a request that the target does not fit."""
    torch.manual_seed(request.seed)
    drafter: TrainedDrafter
    if request.kind == "draft":
        drafter = DraftModel(request, target)
    else:
        drafter = Medusa(request, target) if request.kind == "medusa" else Eagle(request, target, frequency)
    drafter.module.to(target.device)
    return drafter
