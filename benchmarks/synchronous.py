"""Ask-then-verify, the baseline: a verifier that waits for its drafter's whole answer in every round.

usage: python -m benchmarks.synchronous     (settings: VERIFIER_*, as of `python -m verifier_svc`)

Its drafter is to be started with DRAFTER_MAX_NODES = max_draft_tokens and DRAFTER_WIDTH = 1: then it drafts a chain
after each commit and nothing ahead of need. The verifier is the real one but for the waiting rule, which is replaced
by "until the answer is complete", as in engines that ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slipstream.config import from_env
from slipstream.process import run_role, until_signal
from verifier_svc.config import VerifierConfig
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.executor import StepOutcome
from verifier_svc.rounds.round_result import StepTiming
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits, StepPlan
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.verifier import VerifierParts, running

ANSWER_TIMEOUT_S = 1.0


class SynchronousPlanner(Planner):
    """Holds every step back until each session's tree holds as many candidates as it may verify. Every chain is as long
    as was asked for, whatever its tokens are worth."""

    def __init__(
        self,
        drafters: CandidateSources,
        limits: StepLimits,
        curve: CostCurve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(drafters, limits, curve, clock)
        drafters.set_threshold(0.0)
        self.feedback.observe_step = _learn_nothing  # type: ignore[method-assign]

    def hold_s(self, plan: StepPlan, waited_s: float) -> float:
        if not plan.decoding or waited_s >= ANSWER_TIMEOUT_S:
            return 0.0
        missing = any(each.session.tree.depth < each.session.draft_limit for each in plan.step)
        return ANSWER_TIMEOUT_S - waited_s if missing else 0.0


def _learn_nothing(plan: StepPlan, timing: StepTiming, outcomes: Sequence[StepOutcome]) -> float:
    """Of what a candidate must be worth."""
    return 0.0


async def main() -> None:
    config = from_env(VerifierConfig, "VERIFIER_")
    async with running(config, VerifierParts(planner=SynchronousPlanner)) as verifier:
        await verifier.server.set_serving(True)
        print(f"ready grpc={verifier.address}", flush=True)
        await until_signal()


if __name__ == "__main__":
    run_role("verifier", main())
