"""A run of `slipstream train draft`, `medusa` or `eagle`: texts, training, the best checkpoint, export, report."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.devices import find_device
from training.acceptance import SIZES, Ranks, SimulatedAcceptance, measure_ranks, simulate
from training.corpus import TrainingBatch
from training.draft import DraftModel
from training.eagle import Eagle
from training.medusa import Medusa
from training.network import ModuleLearner
from training.report import Report, write_report
from training.request import TrainRequest
from training.speed import measure_speed
from training.target import Target
from training.texts import SampleMaker, Samples
from training.trained_drafter import TrainedDrafter
from training.trainer import CheckpointPolicy, LossFunction, Position, Trainer, TrainingCheckpoint

MAY_CHANGE = ("out", "checkpoint_minutes", "device")
"""What a resumed run may have otherwise."""


@dataclass(frozen=True)
class Estimate:
    """What a run will take, before it is begun."""

    target_parameters: int
    trained_parameters: int
    checkpoint_bytes: int
    steps: int
    tokens: int
    """Most of all steps together."""
    memory_bytes: int
    """Peak after two steps: of this process, or of its GPU."""
    seconds: float
    """Seconds of training, as fast as a step was now; before it the target writes its answers."""


class TrainingRun:
    """Opens the target; what it makes depends on the request alone."""

    def __init__(self, request: TrainRequest) -> None:
        self.request = request
        self.device = find_device(request.device)
        self.target = Target(request.target, self.device)

    def estimate(self) -> Estimate:
        """Takes two steps on random tokens, and writes nothing."""
        request, vocabulary = self.request, self.target.vocabulary
        drafter = open_drafter(request, self.target, torch.ones(vocabulary, dtype=torch.int64))
        tokens = torch.randint(vocabulary, (request.rows, request.window))
        batch = TrainingBatch(tokens, torch.ones_like(tokens, dtype=torch.bool)).on(self.device)
        plan = replace(request, steps=2, minutes=0.0)
        trainer = Trainer(plan, ModuleLearner(drafter.module), lambda used, step: batch)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            trainer.step(self._loss_of(drafter))
            seconds.append(time.perf_counter() - began)
        learned = sum(each.numel() for each in trainer.network.masters)
        steps = round(60.0 * request.minutes / min(seconds)) if request.minutes else request.steps
        return Estimate(
            target_parameters=self.target.model.num_parameters(),
            trained_parameters=learned,
            checkpoint_bytes=4 * learned + trainer.optimiser.size(),
            steps=steps,
            tokens=steps * request.rows * request.window,
            memory_bytes=_peak_bytes(self.device),
            seconds=min(seconds) * steps,
        )

    def run(self, *, resume: bool) -> Report:
        """Trains, exports the best checkpoint to `out` and writes `report.html` beside it. Raises FailedPrecondition
        where checkpoints are of another request, and what reading the data raises."""
        request = self.request
        samples = SampleMaker(request, self.target).make()
        drafter = open_drafter(request, self.target, samples.frequency(self.target.vocabulary))
        learner = ModuleLearner(drafter.module)
        same = {name: value for name, value in asdict(request).items() if name not in MAY_CHANGE}
        best = _BestCheckpoint(request, repr(same), learner)

        def observe(position: Position) -> str:
            if position.step % request.evaluate_steps == 0 or position.finished:
                best.add(position, simulate(self._ranks(drafter, samples)))
            return _finding(position)

        policy = CheckpointPolicy(request.workplace / "last.pt", repr(same), request.checkpoint_minutes, resume)
        trainer = Trainer(request, learner, lambda used, step: self._batch(samples, used, step))
        position = trainer.run(self._loss_of(drafter), policy, observe)
        step = best.restore()
        texts = self._ranks(drafter, samples)
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
            speed=measure_speed(request.target, drafter, self.device),
            layout=drafter.layout,
            looping=samples.looping,
        )
        write_report(report, request.workplace / "report.html")
        return report

    def _batch(self, samples: Samples, used: float, step: int) -> TrainingBatch:
        return replace(samples.batch(step, self.request.rows, self.request.seed), used=used).on(self.device)

    def _ranks(self, drafter: TrainedDrafter, samples: Samples) -> list[Ranks]:
        with self._autocast():
            return measure_ranks(drafter, self.target, samples.held_out)

    def _loss_of(self, drafter: TrainedDrafter) -> LossFunction:
        def loss_of(_: Any, batch: TrainingBatch) -> torch.Tensor:
            states = self.target.read(batch.tokens, drafter.layers)
            with self._autocast():
                return drafter.loss(batch, states)

        return loss_of

    def _autocast(self) -> AbstractContextManager[Any]:
        """Products in the type that the target is computed in."""
        return torch.autocast(self.device.type, self.target.dtype, enabled=self.target.dtype != torch.float32)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
    return f"  {last['length']:.2f} tokens a round, accepted by depth {depths}"


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
