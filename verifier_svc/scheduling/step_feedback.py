"""Learning from steps that ended: seconds of a step, the worth of candidates, the sessions for which drafting pays."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.speculation.selection import ROOT
from slipstream.tenants import PerTenant
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.estimators.calibration import Calibration
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.executor import ScheduledSequence, StepOutcome
from verifier_svc.rounds.round_result import StepTiming
from verifier_svc.scheduling.candidate_offers import labels, workload
from verifier_svc.scheduling.prompt_room import PromptRoom
from verifier_svc.scheduling.step_plan import StepPlan
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.wait_policy.drafting_trial import ComparedStep, compared_step
from verifier_svc.wait_policy.wait_policy import DraftedRound, WaitPolicy


class StepFeedback:
    """Updates the estimates that a planner plans by. Of a session it changes only `drafting_state`."""

    def __init__(
        self,
        sources: CandidateSources,
        curve: CostCurve,
        calibrations: PerTenant[Calibration],
        wait_policy: WaitPolicy[Session],
        prompt_room: PromptRoom,
        always_speculate: bool,
    ) -> None:
        self._sources = sources
        self._curve = curve
        self._calibrations = calibrations
        self._wait_policy = wait_policy
        self._prompt_room = prompt_room
        self._always_speculate = always_speculate

    def observe_step(self, plan: StepPlan, timing: StepTiming, outcomes: Sequence[StepOutcome]) -> float:
        """Learns from the plan's step; steps with prefill do not show what decoding costs. Returns the seconds of the
        step that its rejected candidates took."""
        if plan.decoding:
            self._prompt_room.observe_plain(timing.tokens, timing.sessions, timing.seconds)
            self._curve.observe(timing.tokens, timing.sessions, timing.seconds)
            self._sources.context.session_rate = self._wait_policy.rate(plan) / timing.sessions
            drafted = {
                each.session
                for each in plan.step
                if each.session.request.max_draft_tokens and self._sources.has_source(each.session)
            }
            drafting = len([session for session in drafted if session.drafting_state.drafting])
            changed = self._wait_policy.observe_step(
                plan,
                timing.tokens,
                timing.seconds + timing.waited,
                self._compared(drafting, timing, outcomes),
                plan.others,
                none_drafts=bool(drafted) and not drafting,
            )
            if not changed and not self._always_speculate:
                self._observe_drafting(drafted, plan, timing, outcomes)
        else:
            self._observe_prompts(plan, timing)
            changed = self._wait_policy.observe_prefill_step()
        if changed:
            self._sources.set_threshold(self._wait_policy.threshold)
        if timing.tokens <= timing.sessions:
            return 0.0
        pairs = zip(plan.step, outcomes, strict=True)
        rejected = sum(len(each.selection) - len(it.path) for each, it in pairs if isinstance(it, AcceptanceResult))
        seconds = self._curve.seconds
        return seconds(timing.tokens, timing.sessions) - seconds(timing.tokens - rejected, timing.sessions)

    def _observe_prompts(self, plan: StepPlan, timing: StepTiming) -> None:
        """Learns from a step with prompts what they added to it."""
        prompts = [scheduled for scheduled in plan.step if scheduled.computed < scheduled.base - 1]
        decoding = len(plan.step) - len(prompts)
        own = timing.tokens - sum(scheduled.tokens for scheduled in prompts)
        pairs = sum(len(scheduled.pending) * scheduled.computed for scheduled in prompts)
        self._prompt_room.observe(own, decoding, timing.tokens, pairs, timing.seconds)

    def _compared(self, drafting: int, timing: StepTiming, outcomes: Sequence[StepOutcome]) -> ComparedStep | None:
        """The step as trials of drafting see it; None where it shows nothing of drafting. `drafting`: sessions that
        drafters draft for."""
        if self._always_speculate:
            return None
        tokens = sum(len(it.path) + 1 for it in outcomes if isinstance(it, AcceptanceResult))
        return compared_step(timing.sessions, drafting, tokens, timing.tokens, timing.elapsed)

    def _observe_drafting(
        self, drafted: set[Session], plan: StepPlan, timing: StepTiming, outcomes: Sequence[StepOutcome]
    ) -> None:
        """Learns for which sessions of the step drafting pays. `drafted`: those that have drafters."""
        rounds = [
            DraftedRound(session, session.drafting_state, len(it.path) + 1, len(each.selection))
            for each, it in zip(plan.step, outcomes, strict=True)
            if (session := each.session) in drafted and isinstance(it, AcceptanceResult)
        ]
        for session in self._wait_policy.observe_drafting(rounds, timing.tokens, timing.sessions):
            self._sources.drafting_changed(session)

    def observe_round(self, scheduled: ScheduledSequence, result: AcceptanceResult) -> None:
        """Learns from what became of the sequence's candidates."""
        session, chosen, path = scheduled.session, scheduled.selection, result.path
        if len(chosen):
            calibration = self._calibrations[session.request.tenant]
            calibration.learn(labels(session, chosen), workload(session), chosen, path)
            rejected = chosen.first_child(path[-1] if path else ROOT) is not None
            self._wait_policy.observe_round(len(path), rejected, session.request.tenant)

    def cost_s(self, scheduled: ScheduledSequence, timing: StepTiming) -> float:
        """The sequence's own seconds of a step. The time that as many sessions take without further tokens is divided
        evenly, the rest in proportion to further tokens; the parts add up to the whole."""
        further = timing.tokens - timing.sessions
        if not further:
            return timing.seconds / timing.sessions
        least = min(timing.seconds, self._curve.seconds(timing.sessions, timing.sessions))
        return least / timing.sessions + (timing.seconds - least) * (scheduled.tokens - 1) / further
