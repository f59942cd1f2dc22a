"""Decides what the next step holds: which sessions decode, which of their candidates it verifies, how much it prefills.

Per session it takes the likeliest candidates up to the draft limit and calibrates their path probabilities, then
`budget.allot` divides the step's tokens among all sessions. Sessions under the ratio rule (`rejection`) do not compete:
they get a fixed share. Every session that decodes has its own token in the step, unless its tenant would slow another
one down by more than its share (`step_shares`), or an executor has too few places, which tenants share. Prompts take
what `prefill` gives them. Later a step may only lose candidates: `KVAdmission.fit` where KV runs out, fault isolation
after a failed pass. `wait_policy` decides how long a step is held back for candidates on their way, `step_feedback`
learns from steps that ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from slipstream.speculation.selection import Selection
from slipstream.tenants import PerTenant
from verifier_svc.estimators.calibration import Calibration
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.grammar.constraints import Constraint
from verifier_svc.scheduling.budget import allot
from verifier_svc.scheduling.candidate_offers import CandidateOffers, OfferedSession
from verifier_svc.scheduling.fairness import turns
from verifier_svc.scheduling.prompt_room import PromptRoom
from verifier_svc.scheduling.step_feedback import StepFeedback
from verifier_svc.scheduling.step_plan import StepLimits, StepPlan
from verifier_svc.scheduling.step_shares import Shares, StepCosts, StepShares, StepWork, TenantPart
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.wait_policy.arrival_times import DelayDistribution
from verifier_svc.wait_policy.wait_policy import ExpectedGain, PricedStep, WaitPolicy

PROMPT_PLACES = 4
"""One of so many places of a step is for prompts, where its sessions are bounded."""
NO_CANDIDATES = Selection()
MOST_MASKS_S = 0.05
"""Seconds that a step may wait for masks beyond those that it may wait for candidates."""
MOST_SCORED = 256
"""Most tokens of a step whose prompts' log-probabilities are wanted: each has a row of logits, as wide as the
vocabulary."""


class Planner:
    """Plans steps over sessions, by what `feedback` learned. Of a session it changes only `choice`, its cache, and
    `drafting_state`."""

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
        self._offers = CandidateOffers(limits.executor, self._calibrations)
        self._prompt_room = PromptRoom(curve, limits.step_tokens, limits.prefill_tokens, limits.prompt_step_s)
        self._step_shares = StepShares()
        self.feedback = StepFeedback(
            sources, curve, self._calibrations, self._wait_policy, self._prompt_room, limits.always_speculate
        )
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
        plain = bool(decoding) and self._prompt_room.plain_next
        prefilling = [] if plain else [session for session in runnable if session.pending > 1]
        reserved = 0
        if decoding and prefilling:
            beside = self._prompt_room.beside(len(decoding), len(decoding), self._prompt_room.least_s(prefilling))
            most = min(beside, self._limits.step_tokens // 2)
            reserved = min(most, sum(session.pending for session in prefilling))
        places = min(self._limits.step_tokens - reserved, self._most_decoding(len(prefilling)))
        decoding = _first(decoding, places, lambda session: session.idle_since)
        plan = self._plan_decoding(decoding, prefilling, reserved)
        if prefilling:
            used, here = sum(scheduled.tokens for scheduled in plan.step), len(plan.step)
            places = self._limits.executor.max_sequences - here
            prompts = _first(prefilling, places, lambda session: session.arrival)
            scored = MOST_SCORED
            for session, size in self._prompt_room.divide(prompts, used, here, plan.limit_s, plan.prompts).items():
                if session.scores_prompt:
                    size = min(size, scored)
                    scored -= size
                if size:
                    plan.step.append(_schedule(session, size, NO_CANDIDATES))
        return plan

    def _has_masks(self, constraint: Constraint) -> bool:
        self._masks_s = max(self._masks_s, constraint.worth_waiting_s())
        return constraint.ready

    def _plan_decoding(self, sessions: list[Session], prompts: list[Session], prefill: int) -> StepPlan:
        """Chooses candidates of `sessions`, and which of these sit the step out for the sake of other tenants' times;
        `prefill` tokens of `prompts` share the step."""
        room = self._limits.step_tokens - prefill - len(sessions)
        offered = self._offers.of(sessions, room)
        tenants = list(dict.fromkeys(session.request.tenant for session in (*sessions, *prompts)))
        plan = self._allotted(offered, room, prefill)
        if len(tenants) > 1:
            cost = self._prompt_room.costs(prompts)
            works = _works(tenants, offered, prompts)
            used = sum(scheduled.tokens for scheduled in plan.step)
            seconds = cost.whole(used, len(plan.step), prefill)
            limit_s, shares = self._step_shares.divide(works, cost, _parts(tenants, plan), seconds)
            if shares is not None:
                prefill = shares.prompts
                plan = replace(self._shared(shares, offered, cost), prompts=prefill)
            others = self._others(_parts(tenants, plan), shares is not None)
            plan = replace(plan, limit_s=limit_s, others=others)
            here = max(1, len(plan.step))
            room = min(room, cost.within(here, limit_s, self._limits.step_tokens) - prefill - len(plan.step))
        return self._with_windows(plan, room - sum(len(scheduled.selection) for scheduled in plan.step), prefill)

    def _shared(self, shares: Shares, offered: list[OfferedSession], cost: StepCosts) -> StepPlan:
        """The best step within the tenants' shares, in which none has less than it is promised."""
        left, prefill = dict(shares.places), shares.prompts
        here: list[OfferedSession] = []
        for each in sorted(offered, key=lambda each: (each.session.request.priority, each.session.idle_since)):
            tenant = each.session.request.tenant
            if left[tenant] > 0:
                left[tenant] -= 1
                most = (shares.tokens[tenant] - shares.places[tenant]) // shares.places[tenant]
                here.append(each if each.offer else each._replace(selection=each.selection.head(most)))
        groups = {each.session.request.tenant: each.offer.group for each in here if each.offer is not None}
        least: dict[int, int] = {}
        room = sum(shares.tokens.values()) - len(here)
        while True:
            plan = self._allotted(here, room, prefill, least)
            used = sum(scheduled.tokens for scheduled in plan.step)
            owed = shares.owed(_parts(shares.rates, plan), cost.whole(used, len(plan.step), prefill))
            more = {groups[tenant]: shares.least[tenant] for tenant in owed if tenant in groups}
            if more.keys() <= least.keys():
                return plan
            least |= more

    def _others(self, parts: Mapping[str, TenantPart], divided: bool) -> PricedStep | None:
        """The step without the tenant that has the most of it; None where no other one decodes. A step that is divided,
        or more than half of which is one tenant's, does not show whether drafting pays for the others."""
        heavy = max(parts.values(), key=lambda part: part.tokens)
        rest = [part for part in parts.values() if part is not heavy]
        tokens, sessions = sum(part.tokens for part in rest), sum(part.sessions for part in rest)
        if not sessions:
            return None
        rate = sum(part.expected for part in rest) / self._curve.seconds(tokens, sessions)
        return PricedStep(sessions, tokens, rate, divided or heavy.tokens > tokens)

    def _allotted(
        self, offered: list[OfferedSession], room: int, prefill: int, least: Mapping[int, int] | None = None
    ) -> StepPlan:
        """The step with the best candidates of these sessions, at most `room` in all."""
        aside = sum(len(each.selection) for each in offered if each.offer is None)
        offers = [each.offer for each in offered if each.offer is not None]
        seconds = self._curve.over(max(1, len(offered)))
        allotment = allot(offers, seconds, room - aside, len(offered) + aside, prefill, least)
        counts = iter(allotment.counts)
        chosen = [each.selection.head(next(counts)) if each.offer else each.selection for each in offered]
        step = [_schedule(each.session, 1, some) for each, some in zip(offered, chosen, strict=True)]
        paths = {each.session: list(each.offer.probabilities) for each in offered if each.offer is not None}
        return StepPlan(step, allotment.tokens + len(offered) - len(offers), allotment.seconds, paths)

    def _with_windows(self, plan: StepPlan, room: int, prefill: int) -> StepPlan:
        """The plan with rows of lookahead windows, where a session's candidates leave them room and they pay."""
        windows = [scheduled.session.window for scheduled in plan.step]
        if not any(windows) or not self._limits.executor.verifies_trees:
            return plan
        price = 0.0 if self._limits.always_speculate else self.candidate_price
        step: list[ScheduledSequence] = []
        for scheduled, window in zip(plan.step, windows, strict=True):
            if window is not None and not scheduled.session.request.sampling.drawn:
                left = self._offers.limit(scheduled.session) - len(scheduled.selection)
                scheduled = scheduled._replace(window=window.rows(min(left, room), price))
                room -= len(scheduled.window)
            step.append(scheduled)
        tokens = prefill + sum(scheduled.tokens for scheduled in step)
        return replace(plan, step=step, seconds=self._curve.seconds(tokens, max(1, len(step))))

    def _most_decoding(self, prompts: int) -> int:
        """Most sessions of a step that decode: where the executor bounds its sessions, prompts get some places too."""
        most = self._limits.executor.max_sequences
        return most - min(prompts, most // PROMPT_PLACES)

    # Waiting.

    def hold_s(self, plan: StepPlan, waited_s: float) -> float:
        """Seconds for which the step is to be held back, after `waited_s` seconds of waiting; 0: it starts now. What a
        step waits for, and how long at most, the docstring of `verifier_svc.wait_policy` lists. Masks come first
        (`plan` found out how long they are worth waiting for), and are waited for MOST_MASKS_S longer than candidates,
        since masks of late candidates begin late."""
        if self._masks_s and waited_s < self._limits.max_wait_s + MOST_MASKS_S:
            return self._masks_s
        if not plan.decoding:
            return 0.0
        now = self._clock()
        if self._limits.always_speculate:
            some = [each for each in plan.step if self._offers.limit(each.session)]
            late = any(
                self._sources.proposing(each.session) if each.selection else self._sources.awaited(each.session, now)
                for each in some
            )
            return self._report_hold(plan, max(0.0, self._limits.max_wait_s - waited_s) if late else 0.0)
        gains: dict[Session, ExpectedGain] = {}
        awaited: dict[Session, tuple[DelayDistribution, float]] = {}
        for each in plan.step:
            session = each.session
            if self._offers.limit(session) and (attachment := self._sources.awaited(session, now)) is not None:
                gains[session] = self._expected_gain(each, plan, attachment.number)
                awaited[session] = attachment.delays, now - attachment.since
        left_s = plan.limit_s - plan.seconds
        return self._report_hold(plan, self._wait_policy.hold_s(plan, gains, awaited, waited_s, left_s))

    def _report_hold(self, plan: StepPlan, seconds: float) -> float:
        """Informs sources that propose only while a step is held back. Returns `seconds`."""
        if seconds > 0.0:
            self._sources.step_held(each.session for each in plan.step)
        return seconds

    def _expected_gain(self, scheduled: ScheduledSequence, plan: StepPlan, source: int) -> ExpectedGain:
        """Estimates the gain of the sequence by waiting for candidates of this source."""
        session, chosen = scheduled.session, scheduled.selection
        paths = plan.paths.get(session) or self._offers.paths(session, chosen)
        own = [source in sources for sources in chosen.sources]
        limit = self._offers.limit(session)
        return self._wait_policy.expected_gain(
            session.tree.version, paths, chosen.parents, own, limit, session.request.tenant
        )

    # What others read of it.

    @property
    def candidate_price(self) -> float:
        """Tokens that one more candidate costs the step that takes it."""
        return self._wait_policy.candidate_price

    @property
    def pause_cause(self) -> str:
        """Why drafters pause (`WaitPolicy.pause_cause`); empty while they draft."""
        return self._wait_policy.pause_cause

    @property
    def drafting_slowdown(self) -> float:
        """Seconds that steps take with drafting for each second without, candidates aside."""
        return self._wait_policy.drafting_slowdown

    def open_session(self, session: Session) -> None:
        """The session begins, before its drafters know it."""
        if session.request.max_draft_tokens and not self._limits.always_speculate:
            session.drafting_state = self._wait_policy.new_session(session.request.tenant)

    def session_ended(self, session: Session) -> None:
        """No step holds the session any more, and its last one was observed."""
        session.drafting_state.end_try()

    def prepare(self) -> None:
        """Computes ahead what the next plan needs and no arrival changes. Called while a step runs."""
        for calibration in self._calibrations:
            calibration.draw_curves()


def _first(sessions: list[Session], places: int, waits: Callable[[Session], float]) -> list[Session]:
    """As many sessions as there are places: by priority, then tenant by tenant in turn, each tenant's in the order of
    `waits`."""
    ordered = sorted(sessions, key=lambda session: (session.request.priority, waits(session)))
    if len(ordered) <= places:
        return ordered
    turn = dict(zip(ordered, turns(session.request.tenant for session in ordered), strict=True))
    return sorted(ordered, key=lambda session: (session.request.priority, turn[session]))[:places]


def _works(
    tenants: Iterable[str], offered: Sequence[OfferedSession], prompts: Sequence[Session]
) -> dict[str, StepWork]:
    own: dict[str, list[OfferedSession]] = {tenant: [] for tenant in tenants}
    pending = dict.fromkeys(own, 0)
    for each in offered:
        own[each.session.request.tenant].append(each)
    for session in prompts:
        pending[session.request.tenant] += session.pending
    found: dict[str, StepWork] = {}
    for tenant, some in own.items():
        aside = sum(len(each.selection) for each in some if each.offer is None)
        offers = [each.offer for each in some if each.offer is not None]
        found[tenant] = StepWork(len(some), aside, offers, pending[tenant])
    return found


def _parts(tenants: Iterable[str], plan: StepPlan) -> dict[str, TenantPart]:
    """The tenants' parts of a step without prompts and windows."""
    found = {tenant: TenantPart(0, 0, 0.0) for tenant in tenants}
    for each in plan.step:
        before = found[each.session.request.tenant]
        expected = 1.0 + sum(plan.paths.get(each.session, [])[: len(each.selection)])
        found[each.session.request.tenant] = TenantPart(
            before.sessions + 1, before.tokens + each.tokens, before.expected + expected
        )
    return found


def _schedule(session: Session, size: int, selection: Selection) -> ScheduledSequence:
    start = session.computed
    tokens = session.tokens[start : start + size]
    return ScheduledSequence(session, len(session.tokens), start, tokens, size == session.pending, selection)
