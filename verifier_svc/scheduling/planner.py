"""What the next step verifies: the budget over all sessions, fed by what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.estimators.calibration import Calibration
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.embedded import ScheduledSequence
from verifier_svc.scheduling.budget import Offer, allot
from verifier_svc.scheduling.prefill import chunks
from verifier_svc.session import CandidateChoice, Session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.wait_policy.arrival_gain import ExpectedGain
from verifier_svc.wait_policy.wait_policy import WaitPolicy

NOTHING = Selection()
NOTHING_OFFERED = CandidateChoice(-1, 0, NOTHING, [])


@dataclass(frozen=True, slots=True)
class StepLimits:
    step_tokens: int
    prefill_tokens: int
    max_wait_s: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    turns: list[ScheduledSequence]
    tokens: float
    """That the step commits, in expectation."""
    seconds: float
    """That it takes, in expectation."""
    paths: dict[Session, list[float]]
    """Calibrated path probabilities of each competing session's best candidates, of which its turn has the first."""

    @property
    def sessions(self) -> int:
        return len(self.turns)

    @property
    def decoding(self) -> bool:
        """Whether every session gets a token: no prefill in it, not even one that ends."""
        return bool(self.turns) and all(turn.computed == turn.base - 1 for turn in self.turns)

    def only(self, turns: list[ScheduledSequence]) -> StepPlan:
        """With these turns, some of which have fewer candidates than before."""
        paths = (self.paths.get(turn.session, [])[: len(turn.selection)] for turn in turns if turn.complete)
        return replace(self, turns=turns, tokens=sum(1.0 + sum(some) for some in paths))


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Of one step."""

    sessions: int
    tokens: int


class Planner:
    """Reads sessions and changes none, but for what it keeps there of its own (`offer`)."""

    def __init__(
        self,
        drafters: CandidateSources,
        limits: StepLimits,
        curve: CostCurve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters = drafters
        self._limits = limits
        self._curve = curve
        self._clock = clock
        self._calibration = Calibration(clock)
        self._patience = WaitPolicy[Session](drafters.threshold, limits.max_wait_s, curve.seconds)

    def plan(self, sessions: Iterable[Session]) -> StepPlan:
        """Sessions that decode first, then a bounded share of prefill, all within step_tokens. Nobody of the same
        priority starves: those that waited longest decode first, and candidates leave prefill its share."""
        runnable = [session for session in sessions if session.runnable]
        decoding = sorted((s for s in runnable if s.pending == 1), key=lambda s: (s.priority, s.idle_since))
        prefilling = [session for session in runnable if session.pending > 1]
        reserved = 0
        if decoding:
            most = min(self._limits.prefill_tokens, self._limits.step_tokens // 2)
            reserved = min(most, sum(session.pending for session in prefilling))
        decoding = decoding[: self._limits.step_tokens - reserved]
        plan = self._decode(decoding, self._limits.step_tokens - reserved - len(decoding), reserved)
        room = self._limits.step_tokens - sum(1 + len(turn.selection) for turn in plan.turns)
        room = min(room, self._limits.prefill_tokens) if decoding else room
        plan.turns.extend(_turn(session, size, NOTHING) for session, size in chunks(prefilling, room).items())
        return plan

    def pause(self, plan: StepPlan, waited_s: float) -> float:
        """Seconds worth waiting for candidates on their way, having waited so long already."""
        if not plan.decoding:
            return 0.0
        now = self._clock()
        hopes = {turn.session: self._hope(turn, plan) for turn in plan.turns if turn.session.draft_limit}
        return self._patience.pause(plan, hopes, lambda session: self._drafters.awaited(session, now), waited_s)

    def timed(self, plan: StepPlan, seconds: float, waited: float) -> int:
        """The plan's step took so long, after it was held back for `waited` seconds. Only steps without prefill tell
        what decoding costs. Returns the step's tokens."""
        if not plan.decoding:
            return sum(turn.tokens for turn in plan.turns)
        tokens = sum(1 + len(turn.selection) for turn in plan.turns)
        self._curve.observe(tokens, plan.sessions, seconds)
        if self._patience.timed(plan, tokens, seconds + waited):
            self._drafters.set_threshold(self._patience.threshold)
        return tokens

    def spent(self, tokens: int, sessions: int, candidates: int) -> float:
        """Seconds by which so many candidates, of all its tokens, made a step longer."""
        return self._curve.seconds(tokens, sessions) - self._curve.seconds(tokens - candidates, sessions)

    @property
    def price(self) -> float:
        """Tokens that one more candidate costs the step that takes it."""
        return self._patience.price

    def cost_s(self, turn: ScheduledSequence, load: StepLoad, seconds: float) -> float:
        """The turn's own part of a step of so many seconds. What as many sessions take without further tokens is
        divided evenly; the rest by further tokens. The turns' parts make the whole."""
        further = load.tokens - load.sessions
        if not further:
            return seconds / load.sessions
        least = min(seconds, self._curve.seconds(load.sessions, load.sessions))
        return least / load.sessions + (seconds - least) * (turn.tokens - 1) / further

    def judged(self, turn: ScheduledSequence, verdict: AcceptanceResult) -> None:
        """What became of the turn's candidates."""
        chosen, path = turn.selection, verdict.path
        if not len(chosen):
            return
        self._calibration.learn(_labels(turn.session, chosen), turn.session.workload, chosen, path)
        self._patience.judged(len(path), chosen.first_child(path[-1] if path else ROOT) is not None)

    def prepare(self) -> None:
        """What the next plan needs and no arrival changes. To be called while a step runs."""
        self._calibration.draw()

    def _decode(self, sessions: list[Session], room: int, prefill: int) -> StepPlan:
        """The candidates of `sessions`, at most `room` in all; `prefill` other tokens share the step."""
        chosen = dict.fromkeys(sessions, NOTHING)
        for session in sessions:
            # Under the ratio rules the number of nodes must not depend on the tokens that were drawn, so these sessions
            # do not compete: each has its share of the room, set aside before anybody's candidates are looked at.
            if not session.sampling.coupled:
                chosen[session] = drawn(session, min(session.draft_limit, room // len(sessions)))
        aside = sum(map(len, chosen.values()))
        competing = [session for session in sessions if session.sampling.coupled]
        paths: dict[Session, list[float]] = {}
        for session in competing:
            offered = self._offered(session, min(session.draft_limit, room - aside))
            chosen[session], paths[session] = offered.selection, offered.paths
        offers = [Offer(paths[session], session.draft_limit) for session in competing]
        seconds = self._curve.over(max(1, len(sessions)))
        allotment = allot(offers, seconds, room - aside, len(sessions) + aside + prefill)
        for session, count in zip(competing, allotment.counts, strict=True):
            chosen[session] = chosen[session].head(count)
        turns = [_turn(session, 1, selection) for session, selection in chosen.items()]
        return StepPlan(turns, allotment.tokens + len(sessions) - len(competing), allotment.seconds, paths)

    def _offered(self, session: Session, limit: int) -> CandidateChoice:
        """The session's best candidates. While a step waits it is planned again at every arrival, mostly elsewhere."""
        if session.tree.empty:
            return NOTHING_OFFERED
        known, version = session.offer, session.tree.version
        if known is None or known.version != version or known.limit != limit:
            selection = session.tree.select(limit)
            known = session.offer = CandidateChoice(version, limit, selection, self._paths(session, selection))
        return known

    def _paths(self, session: Session, chosen: Selection) -> list[float]:
        return self._calibration.path_probabilities(_labels(session, chosen), session.workload, chosen)

    def _hope(self, turn: ScheduledSequence, plan: StepPlan) -> ExpectedGain:
        session, chosen = turn.session, turn.selection
        paths = plan.paths.get(session) or self._paths(session, chosen)
        return self._patience.hope(session.tree.version, paths, chosen.parents, session.draft_limit)


def drawn(session: Session, budget: int) -> Selection:
    """What a ratio rule judges: a choice that looks at no token, only at the order in which they were drawn."""
    tree = session.tree
    return tree.select_drawn(budget) if session.sampling.acceptance == "recursive" else tree.select_chain(budget)


def _labels(session: Session, chosen: Selection) -> list[str]:
    """Of each node who sent it."""
    return [session.label(sources) for sources in chosen.sources]


def _turn(session: Session, size: int, selection: Selection) -> ScheduledSequence:
    start = session.computed
    tokens = session.tokens[start : start + size]
    return ScheduledSequence(session, len(session.tokens), start, tokens, size == session.pending, selection)
