"""A second executor: it runs steps as the embedded one does, and verifies short chains alone, as vLLM would."""

from __future__ import annotations

from slipstream.engine.engine import Engine, ModelInfo
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import ExecutorLimits, ScheduledSequence, StepOutcome


class ChainExecutor:
    """Raises ValueError for a step with candidates that are not a chain of at most `longest`."""

    hidden_feed = None
    draft_feed = None

    def __init__(self, engine: Engine, longest: int = 3) -> None:
        self.limits = ExecutorLimits(longest, verifies_trees=False)
        self.verified: list[Selection] = []
        """Candidates of all sequences of all steps, those without any left out."""
        self._embedded = EmbeddedExecutor(engine)

    @property
    def model(self) -> ModelInfo:
        return self._embedded.model

    @property
    def kv(self) -> KVCache:
        return self._embedded.kv

    def measure_costs(self, curve: CostCurve, max_tokens: int, limit_s: float) -> None:
        self._embedded.measure_costs(curve, max_tokens, limit_s)

    def execute(self, step: list[ScheduledSequence]) -> list[StepOutcome]:
        for scheduled in step:
            if chosen := scheduled.selection:
                if chosen.parents != (ROOT, *range(len(chosen) - 1)):
                    raise ValueError(f"candidates below {chosen.parents} are no chain")
                if len(chosen) > self.limits.max_candidates:
                    raise ValueError(f"{len(chosen)} candidates are more than {self.limits.max_candidates}")
                self.verified.append(chosen)
        return self._embedded.execute(step)
