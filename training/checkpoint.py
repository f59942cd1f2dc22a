"""What a stopped stage needs to go on: weights, optimiser state, and how much of its budget is gone."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import FailedPrecondition


@dataclass
class Position:
    """Where a stage stands: steps done, tokens seen, training seconds (compilation not counted)."""

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
