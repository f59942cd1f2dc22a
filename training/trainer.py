"""The loop both stages share: step until the time budget is used, with checkpoints on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from slipstream.errors import FailedPrecondition
from training.corpus import Windows
from training.network import Network
from training.settings import Optimisation, TrainingStage


@dataclass
class Position:
    """Progress of a stage: steps done, tokens seen, training seconds (compilation not counted)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    finished: bool = False


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A stage's whole state; `key` names the settings it belongs to."""

    key: str
    position: Position
    masters: list[torch.Tensor]
    optimiser: list[Any]

    def save(self, path: Path) -> None:
        """Write atomically: a reader or a crash never sees half a checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        state = {"key": self.key, "position": asdict(self.position), "masters": self.masters}
        torch.save({**state, "optimiser": self.optimiser}, fresh)
        os.replace(fresh, path)

    @classmethod
    def load(cls, path: Path, key: str) -> TrainingCheckpoint | None:
        """The checkpoint at `path`, or None. Raises FailedPrecondition if it belongs to other settings or data."""
        if not path.exists():
            return None
        state = torch.load(path, weights_only=True)
        if state["key"] != key:
            raise FailedPrecondition(
                f"{path} belongs to a run with other settings or another corpus; repeat that run's options, "
                "choose another cache folder, or start without --resume."
            )
        return cls(key, Position(**state["position"]), state["masters"], state["optimiser"])


LINE_EVERY_S = 30.0


class TrainingProgress:
    """Shows loss (smoothed, nats per token), speed and remaining time of one stage."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self._name = name
        self._console = console or Console(stderr=True)  # what is printed on stdout is the result
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=1.0, status="compiling")
        self._smooth: float | None = None
        self._last_line = 0.0

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, used: float, step: int, loss: float, seconds: float, tokens: int) -> None:
        """`used` of the budget 0..1, the step's `loss`, training `seconds` and `tokens` so far."""
        self._smooth = loss if self._smooth is None else 0.95 * self._smooth + 0.05 * loss
        speed = tokens / max(seconds, 1e-9)
        left = seconds * (1.0 - used) / max(used, 1e-9)
        status = f"step {step}  loss {self._smooth:.3f}  {speed:,.0f} tokens/s  {left / 60:.1f} min left"
        self._bar.update(self._task, completed=used, status=status)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last_line > LINE_EVERY_S or used >= 1.0):
            self._last_line = now
            self._console.print(f"{self._name}  {used:6.1%}  {status}", soft_wrap=True, highlight=False)


class Optimiser:
    """One step of both rules. Muon's step costs about 10 % of a pass and saves far more in steps."""

    def __init__(self, network: Network, chosen: Optimisation) -> None:
        self._network = network
        self._clip = chosen.clip
        self._muon = torch.optim.Muon(
            network.matrices, lr=chosen.muon_rate, weight_decay=chosen.muon_decay, momentum=chosen.muon_momentum
        )
        self._adam = torch.optim.AdamW(
            [network.embedding, *network.vectors], lr=chosen.adam_rate, betas=chosen.adam_betas, weight_decay=0.0
        )
        self._rates = ((self._muon, chosen.muon_rate), (self._adam, chosen.adam_rate))

    def step(self, factor: float) -> None:
        """Apply the collected gradients with `factor` times the base rates, then publish the weights."""
        self._network.collect()
        torch.nn.utils.clip_grad_norm_(self._network.masters, self._clip)
        for rule, rate in self._rates:
            for group in rule.param_groups:
                group["lr"] = rate * factor
            rule.step()  # type: ignore[no-untyped-call]
            rule.zero_grad(set_to_none=True)
        self._network.publish()

    def state(self) -> list[Any]:
        return [rule.state_dict() for rule, _ in self._rates]

    def restore(self, state: list[Any]) -> None:
        for (rule, _), saved in zip(self._rates, state, strict=True):
            rule.load_state_dict(saved)


# Mean loss in nats per position of one batch, tokens int64 [B, T + 1].
LossFunction = Callable[[Network, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CheckpointPolicy:
    """Path and interval of checkpoints, and the key of the settings they must belong to."""

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

    def run(self, loss_of: LossFunction, policy: CheckpointPolicy) -> Position:
        """Train to the end of the budget, from the last checkpoint if `policy.resume`."""
        if policy.resume:
            self._restore(policy)
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
                if self.position.finished or time.monotonic() - saved_at > 60.0 * policy.every_minutes:
                    self.save(policy)
                    saved_at = time.monotonic()
        return self.position

    def save(self, policy: CheckpointPolicy) -> None:
        masters = [master.detach() for master in self.network.masters]
        TrainingCheckpoint(policy.key, self.position, masters, self.optimiser.state()).save(policy.path)

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

    def _restore(self, policy: CheckpointPolicy) -> None:
        checkpoint = TrainingCheckpoint.load(policy.path, policy.key)
        if checkpoint is not None:
            self.position = checkpoint.position
            self.network.restore(checkpoint.masters)
            self.optimiser.restore(checkpoint.optimiser)
