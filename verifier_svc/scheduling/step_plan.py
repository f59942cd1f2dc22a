"""Bounds of a step, and the plan of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from verifier_svc.execution.executor import ExecutorLimits, ScheduledSequence
from verifier_svc.session import Session
from verifier_svc.wait_policy.wait_policy import PricedStep

ANY_CANDIDATES = ExecutorLimits()


@dataclass(frozen=True, slots=True)
class StepLimits:
    step_tokens: int
    """Most tokens of one step."""
    prefill_tokens: int
    """Most prompt tokens of one step in which other sessions decode, however quick they are."""
    max_wait_s: float
    executor: ExecutorLimits = ANY_CANDIDATES
    always_speculate: bool = False
    """True: a step waits max_wait_s for first candidates that are on their way, and for a head's proposal, whether that
    pays or not. The cost curve then has candidates for nothing, so that all are verified."""
    prompt_step_s: float = 0.0
    """Seconds that a step with prompts may take beside sessions that decode, however quick they are; where tenants are
    distinguished, they are too quick for it (`verifier_svc.scheduling.prompt_room`)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: list[ScheduledSequence]
    tokens: float
    """Tokens that the step is expected to commit."""
    seconds: float
    """Seconds that the step is expected to take."""
    paths: dict[Session, list[float]]
    """Calibrated path probabilities of each competing session's best candidates; the step holds the first of them."""
    limit_s: float = math.inf
    """Most seconds that it may take with prompts and waiting, for the sake of each tenant in it."""
    prompts: int = 0
    """Tokens of prompts that are its tenants' due, whatever the limit leaves."""
    others: PricedStep | None = None
    """Price of the step without the tenant that has the most of it, where there are several."""

    @property
    def sessions(self) -> int:
        return len(self.step)

    @property
    def decoding(self) -> bool:
        """True when every session already decoded: no prefill is in the step, not even the end of one."""
        return bool(self.step) and all(scheduled.computed == scheduled.base - 1 for scheduled in self.step)

    def only(self, step: list[ScheduledSequence]) -> StepPlan:
        """The plan with these sequences, some of which have fewer candidates than before."""
        paths = (self.paths.get(each.session, [])[: len(each.selection)] for each in step if each.complete)
        return replace(self, step=step, tokens=sum(1.0 + sum(some) for some in paths))
