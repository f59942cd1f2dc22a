"""The settings of a plan's verifiers and drafters, and how often the target takes a guess."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from capacity.cost import Cost
from drafter_svc.config import DrafterConfig
from slipstream.engine.emulated.model import ALTERNATIVES
from slipstream.proposers.expansion import FEWEST
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.executor import ExecutorLimits

VERIFIER, DRAFTER = VerifierConfig(model="any"), DrafterConfig(model="any")
"""Settings that a plan leaves out have their defaults."""
STEP_TOKENS = ExecutorLimits().step_tokens
"""Most tokens of a step of the embedded engine."""


@dataclass(frozen=True)
class Acceptance:
    """Probabilities that the target takes a drafter's candidates, given that it took all before them."""

    by_depth: Sequence[float]
    """Probability of the first candidate at depth 1, 2 ...; the last one holds for all below it."""
    fanout: float = 0.0
    """Probability that the truth is among the further candidates, where the first one is wrong."""
    width: int = 4
    """Guesses at a place; 1 makes chains."""

    def shares(self, depth: int) -> tuple[float, ...]:
        """Probability of each guess at this depth, 1 below the last committed token."""
        return self._shares[min(depth, len(self._shares)) - 1]

    def draw(self, depth: int, draws: random.Random) -> int:
        """The guess that the target takes at this depth; `width` for a token that is none of them."""
        return bisect_right(self._sums[min(depth, len(self._sums)) - 1], draws.random())

    @cached_property
    def _shares(self) -> list[tuple[float, ...]]:
        return [
            (first, *((1.0 - first) * self.fanout * a for a in ALTERNATIVES))[: self.width] for first in self.by_depth
        ]

    @cached_property
    def _sums(self) -> list[tuple[float, ...]]:
        return [tuple(accumulate(shares)) for shares in self._shares]


@dataclass(frozen=True, slots=True)
class Verifying:
    """The settings of a verifier."""

    cost: Cost
    acceptance: Acceptance
    host_s: float = 0.0
    """Seconds between two passes in which the device waits: planning, committing, talking."""
    host_session_s: float = 0.0
    """Further seconds for each session in the step."""
    sessions: int = VERIFIER.max_sessions
    kv_tokens: int = 1 << 40
    max_draft_tokens: int = 8
    step_tokens: int = STEP_TOKENS
    prefill_tokens: int = VERIFIER.most_prefill_tokens(STEP_TOKENS)
    prompt_step_s: float = VERIFIER.prompt_step_s
    max_wait_s: float = VERIFIER.max_wait_s
    draft: Cost | None = None
    """Co-located speculation: what a pass of the draft model costs on this device, between the target's passes."""
    expand: int = FEWEST

    def around_s(self, sessions: int) -> float:
        """Seconds of a step of so many sessions beside its passes."""
        return self.host_s + self.host_session_s * sessions


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The settings of a drafter."""

    cost: Cost
    host_s: float = 0.0
    """Seconds between two passes in which the device waits."""
    host_session_s: float = 0.0
    """Further seconds for each session in the pass."""
    delay_s: float = 0.0
    """One way to the verifier."""
    max_nodes: int = DRAFTER.max_nodes
    expand: int = FEWEST
    step_tokens: int = DRAFTER.step_tokens

    def around_s(self, sessions: int) -> float:
        """Seconds of a call for so many sessions beside its passes."""
        return self.host_s + self.host_session_s * sessions
