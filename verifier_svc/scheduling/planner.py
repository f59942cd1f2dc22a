"""Decides what the next step holds: which sessions decode, which of their candidates it verifies, how much it prefills.

Per session it takes the likeliest candidates up to the draft limit and calibrates their path probabilities, then
`budget.allot` divides the step's tokens among all sessions. Sessions under the ratio rule (`rejection`) do not compete:
they get a fixed share. Every session that decodes has its own token in the step; where an executor has too few places,
tenants share them. Prompts take what `prefill` gives them. Later a step may only lose candidates: `KVAdmission.fit`
where KV runs out, fault isolation after a failed pass. `wait_policy` decides how long a step is held back for
candidates on their way.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from slipstream.speculation.selection import ROOT, Selection
from slipstream.tenants import PerTenant
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.constraints import GrammarConstraint
from verifier_svc.estimators.calibration import Calibration
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.execution.executor import ExecutorLimits, ScheduledSequence, StepOutcome
from verifier_svc.round_result import StepTiming
from verifier_svc.scheduling.budget import Offer, allot
from verifier_svc.scheduling.fairness import turns
from verifier_svc.scheduling.prefill import PROMPT_STEPS, SHORT_STEPS, PrefillShares, PromptCost, tokens_within
from verifier_svc.session import CandidateChoice, Session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.wait_policy.arrival_times import DelayDistribution
from verifier_svc.wait_policy.drafting_trial import ComparedStep, compared_step
from verifier_svc.wait_policy.wait_policy import ExpectedGain, WaitPolicy

PROMPT_PLACES = 4
"""One of so many places of a step is for prompts, where its sessions are bounded."""
LONG_CONTEXTS = (2048, 8192, 32768)
"""Tokens from which on acceptance is measured apart: draft heads are trained on shorter texts."""
PLAIN_EVERY = 16
"""While prompts come, one of so many steps that decode holds none: it shows what decoding takes by itself."""
OWN_WEIGHT, OWN_LEAST, OWN_MOST = 0.3, 0.25, 4.0
"""Weight of such a step, and the least and most that it counts as, by what the curve gives."""
POOL = 3
"""Candidates of several drafters, the likeliest by their claims, that compete for each place of a step."""
NO_CANDIDATES = Selection()
MOST_SCORED = 256
"""Most tokens of a step whose prompts' log-probabilities are wanted: each has a row of logits, as wide as the
vocabulary."""
ANY_CANDIDATES = ExecutorLimits()
NO_CHOICE = CandidateChoice(-1, 0, NO_CANDIDATES, [])


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


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: list[ScheduledSequence]
    tokens: float
    """Tokens that the step is expected to commit."""
    seconds: float
    """Seconds that the step is expected to take."""
    paths: dict[Session, list[float]]
    """Calibrated path probabilities of each competing session's best candidates; the step holds the first of them."""

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


class Planner:
    """Plans steps over sessions and learns from their outcomes. Changes only `choice` of a session, its cache."""

    def __init__(
        self,
        sources: CandidateSources,
        limits: StepLimits,
        curve: CostCurve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._limits = limits
        self._curve = curve
        self._clock = clock
        self._calibrations = PerTenant(lambda: Calibration(clock))
        self._wait_policy = WaitPolicy[Session](sources.threshold, limits.max_wait_s, curve.seconds)
        self._prompt_cost, self._prefill_shares = PromptCost(), PrefillShares()
        self._own_factor, self._mixed = 1.0, 0
        """What steps without prompts take by what the curve gives, and steps with prompts since the last one."""
        self._masks_s = 0.0
        """Seconds for which the last plan should wait for the masks of a session's grammar."""

    # Planning.

    def plan(self, sessions: Iterable[Session]) -> StepPlan:
        """Decoding sessions first, then a bounded share of prefill, all within step_tokens. No session starves another
        of the same priority: those that waited longest decode first, and candidates leave prefill its share."""
        self._masks_s = 0.0
        runnable = [
            session
            for session in sessions
            if session.runnable and (session.constraint is None or self._has_masks(session.constraint))
        ]
        decoding = [session for session in runnable if session.pending == 1]
        plain = bool(decoding) and self._mixed >= PLAIN_EVERY - 1
        prefilling = [] if plain else [session for session in runnable if session.pending > 1]
        reserved = 0
        if decoding and prefilling:
            most = min(self._room_beside(len(decoding), len(decoding)), self._limits.step_tokens // 2)
            reserved = min(most, sum(session.pending for session in prefilling))
        places = min(self._limits.step_tokens - reserved, self._most_decoding(len(prefilling)))
        decoding = _first(decoding, places, lambda session: session.idle_since)
        plan = self._plan_decoding(decoding, self._limits.step_tokens - reserved - len(decoding), reserved)
        if prefilling:
            places = self._limits.executor.max_sequences - len(decoding)
            prompts = _first(prefilling, places, lambda session: session.arrival)
            scored = MOST_SCORED
            for session, size in self._prefill(prompts, plan).items():
                if session.scores_prompt:
                    size = min(size, scored)
                    scored -= size
                if size:
                    plan.step.append(_schedule(session, size, NO_CANDIDATES))
        return plan

    def _prefill(self, prompts: list[Session], plan: StepPlan) -> dict[Session, int]:
        """Tokens of each prompt that the step computes beside the sessions that decode in it."""
        used, decoding = sum(scheduled.tokens for scheduled in plan.step), len(plan.step)
        if decoding:
            room = min(self._room_beside(used, decoding), self._limits.step_tokens - used)
            room_s = PROMPT_STEPS * self._own_factor * self._curve.seconds(used, decoding)
        else:
            room = self._room_alone(prompts)
            room_s = self._prompt_cost.factor * self._curve.seconds(room, 1)
        return self._prefill_shares.divide(prompts, room, self._prompt_cost.per_pair_s * room / room_s)

    def _room_beside(self, tokens: int, sessions: int) -> int:
        """Most prompt tokens of a step with so many tokens of sessions that decode; one at least."""
        own_s = self._curve.seconds(tokens, sessions)
        most = min(self._limits.prefill_tokens, self._limits.step_tokens - tokens)
        limit_s = PROMPT_STEPS * self._own_factor * own_s / self._prompt_cost.factor
        return max(1, tokens_within(lambda size: self._curve.seconds(tokens + size, sessions) - own_s, most, limit_s))

    def _room_alone(self, prompts: list[Session]) -> int:
        """Most prompt tokens of a step in which no session decodes: fewer where there are other tenants."""
        most = self._limits.step_tokens
        if not any(session.tenant for session in prompts):
            return most
        least_s = SHORT_STEPS * self._curve.seconds(most, 1) / most
        return next((size for size in BUCKETS if self._curve.seconds(size, 1) <= size * least_s and size < most), most)

    def _has_masks(self, constraint: GrammarConstraint) -> bool:
        self._masks_s = max(self._masks_s, constraint.worth_waiting_s())
        return constraint.ready

    def _plan_decoding(self, sessions: list[Session], room: int, prefill: int) -> StepPlan:
        """Chooses candidates of `sessions`, at most `room` in all; `prefill` other tokens share the step."""
        chosen: dict[Session, Selection] = {}
        competing: list[Session] = []
        for session in sessions:
            # Under the ratio rule the number of nodes must not depend on the tokens that were drawn, so these sessions
            # do not compete: each has its share of the room, set aside before any candidates are looked at.
            if not session.sampling.drawn:
                competing.append(session)
            else:
                chosen[session] = self._select(session, min(self._draft_limit(session), room // len(sessions)))
        aside = sum(map(len, chosen.values()))
        limits = [self._draft_limit(session) for session in competing]
        choices = [
            self._choose(session, min(limit, room - aside)) for session, limit in zip(competing, limits, strict=True)
        ]
        offers = [Offer(choice.paths, limit) for choice, limit in zip(choices, limits, strict=True)]
        seconds = self._curve.over(max(1, len(sessions)))
        allotment = allot(offers, seconds, room - aside, len(sessions) + aside, prefill)
        for session, choice, count in zip(competing, choices, allotment.counts, strict=True):
            chosen[session] = choice.selection.head(count)
        step = [_schedule(session, 1, chosen[session]) for session in sessions]
        paths = {session: choice.paths for session, choice in zip(competing, choices, strict=True)}
        plan = StepPlan(step, allotment.tokens + len(sessions) - len(competing), allotment.seconds, paths)
        return self._with_windows(plan, room - sum(map(len, chosen.values())), prefill)

    def _with_windows(self, plan: StepPlan, room: int, prefill: int) -> StepPlan:
        """The plan with rows of lookahead windows, where a session's candidates leave them room and they pay."""
        windows = [scheduled.session.window for scheduled in plan.step]
        if not any(windows) or not self._limits.executor.verifies_trees:
            return plan
        price = 0.0 if self._limits.always_speculate else self.candidate_price
        step: list[ScheduledSequence] = []
        for scheduled, window in zip(plan.step, windows, strict=True):
            if window is not None and not scheduled.session.sampling.drawn:
                left = self._draft_limit(scheduled.session) - len(scheduled.selection)
                scheduled = scheduled._replace(window=window.rows(min(left, room), price))
                room -= len(scheduled.window)
            step.append(scheduled)
        tokens = prefill + sum(scheduled.tokens for scheduled in step)
        return replace(plan, step=step, seconds=self._curve.seconds(tokens, max(1, len(step))))

    def _most_decoding(self, prompts: int) -> int:
        """Most sessions of a step that decode: where the executor bounds its sessions, prompts get some places too."""
        most = self._limits.executor.max_sequences
        return most - min(prompts, most // PROMPT_PLACES)

    def _draft_limit(self, session: Session) -> int:
        """Most candidates of the session that a step can verify."""
        return min(session.draft_limit, self._limits.executor.max_candidates)

    def _choose(self, session: Session, limit: int) -> CandidateChoice:
        """A coupled session's best candidates. While a step is held back, it is planned again whenever candidates
        arrive, and most sessions' trees are as they were."""
        if session.tree.empty:
            return NO_CHOICE
        known, version = session.choice, session.tree.version
        if known is None or known.version != version or known.limit != limit:
            known = session.choice = CandidateChoice(version, limit, *self._likeliest(session, limit))
        return known

    def _likeliest(self, session: Session, limit: int) -> tuple[Selection, list[float]]:
        """A coupled session's best candidates and their calibrated path probabilities. One drafter's claims put its own
        candidates in about the right order; those of several drafters cannot be compared before they are calibrated."""
        if not (session.tree.merged and self._limits.executor.verifies_trees):
            selection = self._select(session, limit)
            return selection, self._paths(session, selection)
        claimed = self._select(session, POOL * limit)
        return claimed.likeliest(self._paths(session, claimed), limit)

    def _select(self, session: Session, limit: int) -> Selection:
        """Candidates of a form that the executor can verify: the likeliest ones, or under the ratio rule the first ones
        drawn (of a chain the first children), whatever their tokens are."""
        tree, trees = session.tree, self._limits.executor.verifies_trees
        if not session.sampling.drawn:
            return tree.select_likeliest(limit) if trees else tree.select_likeliest_chain(limit)
        return tree.select_first_created(limit) if trees else tree.select_first_children(limit)

    def _paths(self, session: Session, chosen: Selection) -> list[float]:
        calibration = self._calibrations[session.tenant]
        return calibration.path_probabilities(_labels(session, chosen), _workload(session), chosen)

    # Waiting.

    def pause(self, plan: StepPlan, waited_s: float) -> float:
        """Seconds worth waiting for masks and candidates on their way, after `waited_s` seconds of waiting."""
        if self._masks_s:
            return self._masks_s
        if not plan.decoding:
            return 0.0
        now = self._clock()
        if self._limits.always_speculate:
            some = [each for each in plan.step if self._draft_limit(each.session)]
            late = any(
                self._sources.proposing(each.session) if each.selection else self._sources.awaited(each.session, now)
                for each in some
            )
            return max(0.0, self._limits.max_wait_s - waited_s) if late else 0.0
        gains: dict[Session, ExpectedGain] = {}
        awaited: dict[Session, tuple[DelayDistribution, float]] = {}
        for each in plan.step:
            session = each.session
            if self._draft_limit(session) and (attachment := self._sources.awaited(session, now)) is not None:
                gains[session] = self._expected_gain(each, plan, attachment.number)
                awaited[session] = attachment.delays, now - attachment.since
        return self._wait_policy.pause(plan, gains, awaited, waited_s)

    def _expected_gain(self, scheduled: ScheduledSequence, plan: StepPlan, source: int) -> ExpectedGain:
        """What waiting for candidates of this source would bring the sequence."""
        session, chosen = scheduled.session, scheduled.selection
        paths = plan.paths.get(session) or self._paths(session, chosen)
        own = [source in sources for sources in chosen.sources]
        limit = self._draft_limit(session)
        return self._wait_policy.expected_gain(session.tree.version, paths, chosen.parents, own, limit, session.tenant)

    # Learning and measuring.

    @property
    def candidate_price(self) -> float:
        """Tokens that one more candidate costs the step that takes it."""
        return self._wait_policy.candidate_price

    @property
    def pause_cause(self) -> str:
        """Why drafters pause (`WaitPolicy.pause_cause`); empty while they draft."""
        return self._wait_policy.pause_cause

    def observe_step(self, plan: StepPlan, timing: StepTiming, outcomes: Sequence[StepOutcome]) -> float:
        """Learns from the plan's step; steps with prefill do not show what decoding costs. Returns the seconds of the
        step that its rejected candidates took."""
        if plan.decoding:
            share = timing.seconds / self._curve.seconds(timing.tokens, timing.sessions)
            self._own_factor += OWN_WEIGHT * (min(max(share, OWN_LEAST), OWN_MOST) - self._own_factor)
            self._mixed = 0
            self._curve.observe(timing.tokens, timing.sessions, timing.seconds)
            changed = self._wait_policy.observe_step(
                plan, timing.tokens, timing.seconds + timing.waited, self._compared(plan, timing, outcomes)
            )
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
        self._mixed += bool(decoding)
        own = timing.tokens - sum(scheduled.tokens for scheduled in prompts)
        own_s = self._curve.seconds(own, decoding) if decoding else 0.0
        curve_s = self._curve.seconds(timing.tokens, max(1, decoding)) - own_s
        own_s *= self._own_factor
        pairs = sum(len(scheduled.pending) * scheduled.computed for scheduled in prompts)
        self._prompt_cost.observe(own_s, curve_s, pairs, timing.seconds)

    def _compared(self, plan: StepPlan, timing: StepTiming, outcomes: Sequence[StepOutcome]) -> ComparedStep | None:
        """The step as trials of drafting see it; None where it shows nothing of drafting."""
        if self._limits.always_speculate:
            return None
        sessions = [scheduled.session for scheduled in plan.step]
        drafted = sum(session.max_draft_tokens > 0 and self._sources.has_source(session) for session in sessions)
        tokens = sum(len(it.path) + 1 for it in outcomes if isinstance(it, AcceptanceResult))
        candidates = timing.tokens > timing.sessions
        return compared_step(timing.sessions, drafted, tokens, timing.elapsed, candidates=candidates)

    def observe_round(self, scheduled: ScheduledSequence, result: AcceptanceResult) -> None:
        """Learns from what became of the sequence's candidates."""
        session, chosen, path = scheduled.session, scheduled.selection, result.path
        if len(chosen):
            calibration = self._calibrations[session.tenant]
            calibration.learn(_labels(session, chosen), _workload(session), chosen, path)
            rejected = chosen.first_child(path[-1] if path else ROOT) is not None
            self._wait_policy.observe_round(len(path), rejected, session.tenant)

    def cost_s(self, scheduled: ScheduledSequence, timing: StepTiming) -> float:
        """The sequence's own seconds of a step. The time that as many sessions take without further tokens is divided
        evenly, the rest in proportion to further tokens; the parts add up to the whole."""
        further = timing.tokens - timing.sessions
        if not further:
            return timing.seconds / timing.sessions
        least = min(timing.seconds, self._curve.seconds(timing.sessions, timing.sessions))
        return least / timing.sessions + (timing.seconds - least) * (scheduled.tokens - 1) / further

    def prepare(self) -> None:
        """Computes ahead what the next plan needs and no arrival changes. Called while a step runs."""
        for calibration in self._calibrations:
            calibration.draw_curves()


def _first(sessions: list[Session], places: int, waits: Callable[[Session], float]) -> list[Session]:
    """As many sessions as there are places: by priority, then tenant by tenant in turn, each tenant's in the order of
    `waits`."""
    ordered = sorted(sessions, key=lambda session: (session.priority, waits(session)))
    if len(ordered) <= places:
        return ordered
    turn = dict(zip(ordered, turns(session.tenant for session in ordered), strict=True))
    return sorted(ordered, key=lambda session: (session.priority, turn[session]))[:places]


def _labels(session: Session, chosen: Selection) -> list[str]:
    """Label of the drafters that sent each node; confidences are calibrated by it."""
    return [session.source_label(sources) for sources in chosen.sources]


def _workload(session: Session) -> str:
    """The kind of work with how long its context is, for a drafter may be good at one length and bad at another; and a
    lossy rule, which accepts more."""
    at = bisect_right(LONG_CONTEXTS, len(session.tokens))
    found = f"{session.workload} beyond {LONG_CONTEXTS[at - 1]} tokens" if at else session.workload
    return f"{found}, {session.sampling.acceptance}" if session.sampling.lossy else found


def _schedule(session: Session, size: int, selection: Selection) -> ScheduledSequence:
    start = session.computed
    tokens = session.tokens[start : start + size]
    return ScheduledSequence(session, len(session.tokens), start, tokens, size == session.pending, selection)
