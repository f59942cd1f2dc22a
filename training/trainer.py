"""The loop that everything trained here shares: step until the budget is used, with checkpoints on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, Protocol

import torch

from slipstream.errors import FailedPrecondition
from training.corpus import TrainingBatch
from training.muon import Muon
from training.progress import TrainingProgress
from training.settings import Budget, Optimisation, Schedule


@dataclass
class Position:
    """Progress of a stage: steps done, tokens seen, training seconds (compilation not counted)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    finished: bool = False
    losses: list[float] = field(default_factory=list)
    """The loss of every step."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Results that the caller added on the way."""


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
        state = torch.load(path, map_location="cpu", weights_only=True)  # a run may go on elsewhere
        if state["key"] != key:
            raise FailedPrecondition(
                f"{path} belongs to a run with other settings or another corpus; repeat that run's options, "
                "choose another cache folder, or start without --resume."
            )
        return cls(key, Position(**state["position"]), state["masters"], state["optimiser"])


class Learner(Protocol):
    """Trained weights: those that compute, and fp32 masters of them that learn."""

    @property
    def masters(self) -> list[torch.Tensor]:
        """All of them: `matrices` inside layers, for Muon, and `others`, for AdamW."""
        ...

    @property
    def matrices(self) -> list[torch.Tensor]: ...

    @property
    def others(self) -> list[torch.Tensor]: ...

    def collect(self) -> None:
        """Moves the gradients to the masters."""
        ...

    def publish(self) -> None:
        """Copies the masters into the weights that compute."""
        ...

    def restore(self, masters: list[torch.Tensor]) -> None:
        """Takes over the masters of a checkpoint."""
        ...


class Optimiser:
    """One step of both rules. Muon's step costs about 10 % of a pass and saves far more in steps."""

    def __init__(self, network: Learner, chosen: Optimisation) -> None:
        self._network = network
        self._clip = chosen.clip
        muon = Muon(
            network.matrices, lr=chosen.muon_rate, weight_decay=chosen.muon_decay, momentum=chosen.muon_momentum
        )
        adam = torch.optim.AdamW(network.others, lr=chosen.adam_rate, betas=chosen.adam_betas, weight_decay=0.0)
        self._rates = ((muon, chosen.muon_rate), (adam, chosen.adam_rate))

    def step(self, factor: float) -> None:
        """Apply the collected gradients with `factor` times the base rates, then publish the weights."""
        self._network.collect()
        torch.nn.utils.clip_grad_norm_(self._network.masters, self._clip)
        for rule, rate in self._rates:
            for group in rule.param_groups:
                group["lr"] = rate * factor
            rule.step()
            rule.zero_grad(set_to_none=True)
        self._network.publish()

    def state(self) -> list[Any]:
        return [rule.state_dict() for rule, _ in self._rates]

    def size(self) -> int:
        """Bytes of what the rules keep."""
        kept = [value for rule, _ in self._rates for state in rule.state.values() for value in state.values()]
        return sum(each.numel() * each.element_size() for each in kept if isinstance(each, torch.Tensor))

    def restore(self, state: list[Any]) -> None:
        for (rule, _), saved in zip(self._rates, state, strict=True):
            rule.load_state_dict(saved)


LossFunction = Callable[[Any, TrainingBatch], torch.Tensor]
"""(what is trained, a batch) -> the mean loss in nats per position."""
Batches = Callable[[float, int], TrainingBatch]
"""(used part of the budget, step) -> the data of a step: it depends on nothing else."""


class TrainingPlan(Protocol):
    """Parameters of a stage that the loop reads."""

    @property
    def name(self) -> str: ...

    @property
    def budget(self) -> Budget: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def optimisation(self) -> Optimisation: ...


@dataclass(frozen=True)
class CheckpointPolicy:
    """Path and interval of checkpoints, and the key of the settings they must belong to."""

    path: Path
    key: str
    every_minutes: float
    resume: bool


class Trainer:
    """Trains one network."""

    def __init__(self, plan: TrainingPlan, network: Learner, batches: Batches) -> None:
        self.plan = plan
        self.network = network
        self.optimiser = Optimiser(network, plan.optimisation)
        self.position = Position()
        self._batches = batches

    def run(
        self, loss_of: LossFunction, policy: CheckpointPolicy, observe: Callable[[Position], str] | None = None
    ) -> Position:
        """Train to the end of the budget, from the last checkpoint if `policy.resume`. `observe` is called after each
        step, and may add to the position's evaluations; what it returns is shown."""
        if policy.resume:
            self._restore(policy)
        saved_at = time.monotonic()
        first = True
        with TrainingProgress(self.plan.name) as progress, _whole_steps() as stopped:
            while not self.position.finished:
                started = time.monotonic()
                loss = self.step(loss_of)
                # The first step of a process compiles; that time is not training.
                self.position.seconds += 0.0 if first else time.monotonic() - started
                first = False
                used = self._used()
                self.position.finished = used >= 1.0
                if observe is not None:
                    progress.finding = observe(self.position)
                progress.update(used, self.position.step, loss, self.position.seconds, self.position.tokens)
                due = time.monotonic() - saved_at > 60.0 * policy.every_minutes
                if self.position.finished or due or stopped.is_set():
                    self.save(policy)
                    saved_at = time.monotonic()
                if stopped.is_set() and not self.position.finished:
                    raise KeyboardInterrupt
        return self.position

    def save(self, policy: CheckpointPolicy) -> None:
        masters = [master.detach() for master in self.network.masters]
        TrainingCheckpoint(policy.key, self.position, masters, self.optimiser.state()).save(policy.path)

    def _used(self) -> float:
        return self.plan.budget.used(self.position.seconds, self.position.step)

    def step(self, loss_of: LossFunction) -> float:
        """One step; returns its loss."""
        used = self._used()
        batch = self._batches(used, self.position.step)
        loss = loss_of(self.network, batch)
        loss.backward()
        self.optimiser.step(self.plan.schedule.factor(used))
        self.position.step += 1
        self.position.tokens += batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)
        self.position.losses.append(float(loss.detach()))
        return self.position.losses[-1]

    def _restore(self, policy: CheckpointPolicy) -> None:
        checkpoint = TrainingCheckpoint.load(policy.path, policy.key)
        if checkpoint is not None:
            self.position = checkpoint.position
            self.position.finished = self._used() >= 1.0  # the run may have been given more
            self.network.restore(checkpoint.masters)
            self.optimiser.restore(checkpoint.optimiser)


@contextmanager
def _whole_steps() -> Iterator[Event]:
    """Ctrl-C sets the event, so that the step that runs ends and is saved; a second one interrupts at once."""
    stopped = Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stopped.set()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
