"""Every number that decides what a training run does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama: widths in numbers of features, `context` in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    context: int = 2048


@dataclass(frozen=True)
class Budget:
    """The length of a stage: `minutes` of wall time or, if given, exactly `steps` (then the result is reproducible)."""

    minutes: float
    steps: int | None = None

    def used(self, seconds: float, steps: int) -> float:
        """The fraction of the budget gone, 0 to 1."""
        part = steps / self.steps if self.steps is not None else seconds / (60.0 * self.minutes)
        return min(1.0, part)


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor over the used fraction of the budget: warm-up, stable, linear decay to 0."""

    warm_up: float = 0.02
    decay_from: float = 0.5
    peak: float = 1.0
    """A model that starts from trained weights learns at a lower rate."""

    def factor(self, used: float) -> float:
        """Between 0 and 1; a stop at the deadline is a proper finish because the factor is 0 there."""
        if used < self.warm_up:
            return self.peak * max(0.02, used / self.warm_up)
        if used < self.decay_from:
            return self.peak
        return self.peak * max(0.0, (1.0 - used) / (1.0 - self.decay_from))


@dataclass(frozen=True)
class Optimisation:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""

    muon_rate: float = 0.02
    muon_decay: float = 0.05
    muon_momentum: float = 0.95
    adam_rate: float = 3e-3
    adam_betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0


@dataclass(frozen=True)
class TrainingStage:
    """One model's training. From `long_from` of the budget on, windows are longer and fewer (same tokens per step)."""

    name: str
    shape: Shape
    budget: Budget
    rows: int = 8
    window: int = 512
    long_from: float = 0.8
    long_window: int = 1024
    schedule: Schedule = Schedule()
    optimisation: Optimisation = Optimisation()


TARGET = Shape(hidden=384, layers=6, heads=6, kv_heads=2, feed_forward=1024)
DRAFT = Shape(hidden=128, layers=2, heads=4, kv_heads=2, feed_forward=512)


@dataclass(frozen=True)
class Settings:
    """A whole run. `seed` decides initial weights and data order."""

    target: TrainingStage
    draft: TrainingStage
    vocabulary: int = 4096
    seed: int = 17
    checkpoint_minutes: float = 5.0
    evaluation_windows: int = 96
    compiled: bool = True
