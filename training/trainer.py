"""The loop both stages share: step until the time budget is used, with checkpoints on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from training.checkpoint import Position, TrainingCheckpoint
from training.network import Network
from training.optimiser import Optimiser
from training.progress import TrainingProgress
from training.settings import TrainingStage
from training.windows import Windows

# Mean loss in nats per position of one batch, tokens int64 [B, T + 1].
LossFunction = Callable[[Network, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Keeping:
    """Where and how often to save, and the settings a checkpoint must belong to."""

    path: Path
    key: str
    every_minutes: float
    resume: bool


class Trainer:
    """Trains one network on one stream; the data of a step depends on the seed and the step alone."""

    def __init__(self, stage: TrainingStage, network: Network, stream: npt.NDArray[np.int64], seed: int) -> None:
        self.stage = stage
        self.network = network
        self.optimiser = Optimiser(network, stage.optimisation)
        self.position = Position()
        rows = max(1, stage.rows * stage.window // stage.long_window)
        self._short = Windows(stream, stage.window, stage.rows, seed)
        self._long = Windows(stream, stage.long_window, rows, seed + 1)

    def run(self, loss_of: LossFunction, keeping: Keeping) -> Position:
        """Train to the end of the budget, from the last checkpoint if `keeping.resume`."""
        if keeping.resume:
            self._restore(keeping)
        saved_at = time.monotonic()
        first = True
        with TrainingProgress(self.stage.name) as progress:
            while not self.position.finished:
                started = time.monotonic()
                loss = self._step(loss_of)
                # The first step of a process compiles; that time is not training.
                self.position.seconds += 0.0 if first else time.monotonic() - started
                first = False
                used = self._used()
                self.position.finished = used >= 1.0
                progress.update(used, self.position.step, loss, self.position.seconds, self.position.tokens)
                if self.position.finished or time.monotonic() - saved_at > 60.0 * keeping.every_minutes:
                    self.save(keeping)
                    saved_at = time.monotonic()
        return self.position

    def save(self, keeping: Keeping) -> None:
        masters = [master.detach() for master in self.network.masters]
        TrainingCheckpoint(keeping.key, self.position, masters, self.optimiser.state()).save(keeping.path)

    def _used(self) -> float:
        return self.stage.budget.used(self.position.seconds, self.position.step)

    def _step(self, loss_of: LossFunction) -> float:
        used = self._used()
        windows = self._long if used >= self.stage.long_from else self._short
        batch = windows.batch(self.position.step)
        loss = loss_of(self.network, batch)
        loss.backward()
        self.optimiser.step(self.stage.schedule.factor(used))
        self.position.step += 1
        self.position.tokens += batch.shape[0] * (batch.shape[1] - 1)
        return float(loss.detach())

    def _restore(self, keeping: Keeping) -> None:
        checkpoint = TrainingCheckpoint.load(keeping.path, keeping.key)
        if checkpoint is not None:
            self.position = checkpoint.position
            self.network.restore(checkpoint.masters)
            self.optimiser.restore(checkpoint.optimiser)
