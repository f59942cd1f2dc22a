"""The seam between scheduling and a model: a step's sequences go in, one outcome for each comes out.

The scheduler, the planner and KV admission use this interface alone. An implementation runs the target in one forward
pass over all sequences, decides by the acceptance rules, and keeps the KV of accepted tokens: `embedded` does so on the
project's own engine, others stand beside it.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.model_info import ModelInfo
from slipstream.errors import SlipstreamError
from slipstream.speculation.lookahead_window import WindowRows
from slipstream.speculation.selection import Selection
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.draft_feed import DraftFeed
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.hidden_feed import HiddenFeed
from verifier_svc.session import Session


class ScheduledSequence(NamedTuple):
    """The part of one session in one step."""

    session: Session
    base: int
    """Committed length."""
    computed: int
    """Leading tokens whose KV is right."""
    pending: list[int]
    """The tokens after those that this step computes."""
    complete: bool
    """True when `pending` reaches the last committed token, so that the step decides tokens for the session."""
    selection: Selection = Selection()
    """Candidates to verify."""
    window: WindowRows = WindowRows()
    """Rows of a lookahead window, which no acceptance rule looks at."""

    @property
    def tokens(self) -> int:
        """KV rows that the sequence writes in the step."""
        return len(self.pending) + len(self.selection.token_ids) + len(self.window.token_ids)

    @property
    def scored(self) -> int:
        """Leading tokens of `pending` whose rows say how likely the prompt's next token was, where that is wanted."""
        if not self.session.scores_prompt:
            return 0
        last = self.session.request.prompt_length - 1
        return max(0, min(self.computed + len(self.pending), last) - self.computed)

    @property
    def plain(self) -> ScheduledSequence:
        """This sequence in the same step without candidates and window."""
        return self._replace(selection=Selection(), window=WindowRows())


StepOutcome = AcceptanceResult | SlipstreamError | None
"""None for a prefill that continues in a later step."""


class ExecutorLimits(NamedTuple):
    """Limits of an executor for one session in one step."""

    max_candidates: int = sys.maxsize
    """Candidates and window rows together."""
    verifies_trees: bool = True
    """False: candidates must be a chain, so the planner chooses one path of the tree."""
    max_sequences: int = sys.maxsize
    """Most sessions in one step."""
    step_tokens: int = 512
    """Most tokens of one step, unless the verifier's settings say."""
    lossy_rules: bool = True
    """False: only exact acceptance rules are run."""
    scores_prompts: bool = True
    """False: prompts have no log-probabilities."""


class StepExecutor(Protocol):
    """Runs steps of one target model."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def limits(self) -> ExecutorLimits: ...

    @property
    def kv(self) -> KVCache:
        """Called on the event loop between steps, and on the model's thread when a step failed."""

    @property
    def hidden_feed(self) -> HiddenFeed | None:
        """Gives the target's hidden states to drafting methods; None for an executor that has none to give."""

    @property
    def draft_feed(self) -> DraftFeed | None:
        """Draft tokens that come with a step's tokens; None for an executor that drafts nothing."""

    def execute(self, step: list[ScheduledSequence]) -> list[StepOutcome]:
        """Runs one step, whose KV blocks are reserved; returns an outcome for each sequence, in order. Called on the
        model's own thread. Raises EngineLost when no step can run any more. After any other exception, wherever it
        was raised, the step may be run again in parts: what was kept is rolled back to `computed` first."""

    def measure_costs(self, curve: CostCurve, max_tokens: int, limit_s: float) -> None:
        """Measures steps of up to `max_tokens` tokens for about `limit_s` seconds and records their seconds in `curve`.
        Called on the model's own thread before the first step; leaves all KV blocks free."""
