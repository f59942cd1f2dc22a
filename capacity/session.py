"""A session of the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capacity.guessing import SimulatedTree
from verifier_svc.wait_policy.arrival_times import DelayDistribution

if TYPE_CHECKING:
    from capacity.drafting import SimulatedDrafter


@dataclass(slots=True, eq=False)
class SimulatedSession:
    arrived: float
    prompt: int
    output: int
    tree: SimulatedTree
    drafter: SimulatedDrafter | None = None
    rank: int = 0
    """Order of arrival at its verifier."""
    priority: int = 0
    pending: int = 0
    """Tokens of the prompt that the verifier has not read."""
    reading: int = 0
    """The same of its drafter, and what was committed since its last pass; the last token is read in every pass."""
    tokens: int = 0
    """Output so far."""
    first: float = math.nan
    """When the first token came."""
    ended: float = math.nan
    idle_since: float = 0.0
    rounds: int = 0
    version: int = 0
    """Of the candidates that have arrived."""
    since: float = 0.0
    """When candidates began to be awaited (`verifier_svc.sources.source`)."""
    fresh: bool = True
    delays: DelayDistribution = field(default_factory=DelayDistribution)

    def __post_init__(self) -> None:
        self.pending = self.reading = self.prompt

    @property
    def left(self) -> int:
        return self.output - self.tokens

    @property
    def ttft_s(self) -> float:
        return self.first - self.arrived

    @property
    def tpot_s(self) -> float:
        """Seconds of each token after the first one; NaN where there is one only."""
        return (self.ended - self.first) / (self.output - 1) if self.output > 1 else math.nan
