"""A running average."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2
"""Of a new measurement."""


@dataclass(slots=True)
class Average:
    """Exponentially weighted; None before the first measurement."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + WEIGHT * (sample - self.value)
