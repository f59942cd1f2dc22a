"""Decides how long a step is held back for candidates, and which candidates are worth sending at all.

It measures three things over steps and rounds: tokens committed a second, the share of candidates that are accepted,
and how many tokens a wait brought for each that was expected. `wait_time` has the formula, `draft_threshold` the price
of a candidate, `drafting_trial` finds out how much drafting slows steps, and `session_drafting` which sessions it pays
for in spite of that.
The package's docstring lists what a step waits for, and who calls this. Nothing here does I/O or reads a clock, so that
the capacity simulation (`capacity`) waits by these very rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from slipstream.speculation.selection import ROOT
from slipstream.tenants import PerTenant
from verifier_svc.wait_policy.arrival_times import DelayDistribution, delay_bin
from verifier_svc.wait_policy.draft_threshold import PAUSE, DraftThreshold
from verifier_svc.wait_policy.drafting_trial import ComparedStep, DraftingTrial
from verifier_svc.wait_policy.session_drafting import SessionDrafting, TenantDrafting, slows
from verifier_svc.wait_policy.wait_time import Awaited, wait_s

Key = TypeVar("Key")
"""A session."""
FIRST_ACCEPTANCE = 0.6
"""Share of candidates accepted that is assumed before any was measured."""
TIMER_S = 0.001
"""Event loops round their timers up to whole milliseconds."""
MAX_WAIT_STEPS = 2.0
"""No wait is longer than this many steps, whatever it would bring."""
MIN_GAIN_RATIO, MAX_GAIN_RATIO = 0.5, 8.0
"""A larger ratio is an accident. With a smaller one the verifier would stop waiting, and never learn otherwise."""
SAMPLE_WEIGHT = 0.2
"""Weight of a new sample in a running average."""

PAUSE_CAUSES = ("price", "slower", "trial")
"""Why drafters pause: a candidate costs what it brings; no session gains as much as drafting slows it; a trial without
drafting is under way."""


@dataclass(slots=True)
class RunningAverage:
    """Exponentially weighted."""

    value: float | None = None
    """None before the first sample."""

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + SAMPLE_WEIGHT * (sample - self.value)


class PlannedStep(Protocol):
    """A step without prefill, as the planner expects it."""

    @property
    def sessions(self) -> int: ...

    @property
    def tokens(self) -> float:
        """Tokens that it is expected to commit."""

    @property
    def seconds(self) -> float:
        """Seconds that it is expected to take."""


class PricedStep(NamedTuple):
    """The step that a candidate's price is found for, where not all tenants of a step count."""

    sessions: int
    tokens: int
    rate: float
    """Tokens that it commits a second."""
    inconclusive: bool
    """Whether the whole step shows nothing of what drafting is worth to it."""


class ExpectedGain(NamedTuple):
    """Tokens that waiting would bring one session."""

    version: int
    """The version of its tree."""
    worth: float
    """Tokens expected of the candidates that the step would take now."""
    gain: float
    """Tokens that one more candidate would add."""
    cost: float = 0.0
    """Tokens that one more candidate costs the step, or those of the candidate whose place it would take."""


class DraftedRound(NamedTuple, Generic[Key]):
    """Tokens that a session with drafters committed in a step."""

    key: Key
    drafting: SessionDrafting
    tokens: int
    candidates: int
    """Candidates that the step verified for the session."""


class WaitPolicy(Generic[Key]):
    def __init__(self, threshold: float, max_wait_s: float, seconds: Callable[[int, int], float]) -> None:
        """`threshold`: the lowest threshold that drafters are sent; `seconds` gives the duration of a step from its
        tokens and sessions."""
        self._max_wait_s = max_wait_s
        self._step_s = seconds
        self._draft_threshold = DraftThreshold(threshold)
        self._trial = DraftingTrial(seconds)
        self._drafting = PerTenant(TenantDrafting)
        self._none_drafts = False
        """Whether drafting pays for no session of the last step."""
        self._gain_ratio = GainRatio[Key]()
        self._acceptance = PerTenant(lambda: RunningAverage(FIRST_ACCEPTANCE))
        self._tokens, self._seconds = RunningAverage(), RunningAverage()

    @property
    def candidate_price(self) -> float:
        """Tokens that one more candidate costs the step that takes it."""
        return self._draft_threshold.price

    @property
    def threshold(self) -> float:
        """Path probability that candidates must have to be worth sending; PAUSE where drafting does not pay, and in
        trials without it."""
        return PAUSE if self._trial.trying else self._draft_threshold.threshold

    @property
    def drafting_slowdown(self) -> float:
        """Seconds that steps take with drafting for each second without, candidates aside."""
        return self._trial.slowdown

    @property
    def pause_cause(self) -> str:
        """Which of PAUSE_CAUSES holds; empty while drafters draft."""
        if self._draft_threshold.threshold == PAUSE:
            return "price"
        if self._trial.trying:
            return "trial"
        return "slower" if self._none_drafts else ""

    def new_session(self, tenant: str = "") -> SessionDrafting:
        """Whether drafters draft for a session of the tenant that begins."""
        return self._drafting[tenant].new_session(self._trial.slowdown)

    def observe_drafting(self, rounds: Sequence[DraftedRound[Key]], tokens: int, sessions: int) -> list[Key]:
        """Records the rounds of a step's sessions that have drafters; the step is of so many tokens and sessions.
        Returns the sessions for which drafters begin or cease to draft."""
        if self.threshold == PAUSE:  # it shows nothing
            return []
        slowdown, candidate_time = self._trial.slowdown, self._candidate_time(tokens, sessions)
        deciding, changed = slows(slowdown), list[Key]()
        for key, session, committed, candidates in rounds:
            if session.drafting:
                session.count(committed, candidates, candidate_time)
            if deciding:
                if session.decide(slowdown):
                    changed.append(key)
            elif not session.drafting:
                session.resume()
                changed.append(key)
        return changed

    def _candidate_time(self, tokens: int, sessions: int) -> float:
        """Time that each candidate of a step of `tokens` adds to its session's round, in plain rounds: as if all
        sessions of the step had as many."""
        plain_s = max(self._step_s(sessions, sessions), 1e-9)
        added = max(0.0, self._step_s(tokens, sessions) / plain_s - 1.0)
        return added * sessions / max(1, tokens - sessions)

    def observe_round(self, accepted: int, rejected: bool, tenant: str = "") -> None:
        """Counts accepted candidates of a session of the tenant; `rejected`: one behind them was not accepted."""
        self._acceptance[tenant].add(accepted / max(1, accepted + rejected))

    def observe_step(
        self,
        step: PlannedStep,
        tokens: int,
        seconds: float,
        compared: ComparedStep | None = None,
        others: PricedStep | None = None,
        *,
        none_drafts: bool = False,
    ) -> bool:
        """Records a step of `tokens` tokens that took `seconds`, waiting included. `compared`: the step as trials of
        drafting see it; None where it shows nothing of drafting. `others`: of several tenants, the step without the one
        that has the most of it, by which candidates are priced: else that one would cost the others theirs.
        `none_drafts`: drafting pays for none of its sessions. Returns whether the threshold changed."""
        before = self.threshold
        self._none_drafts = none_drafts
        self._tokens.add(step.tokens)
        self._seconds.add(seconds)
        priced = others or PricedStep(step.sessions, tokens, self.rate(step), inconclusive=False)
        self._draft_threshold.observe(priced.rate, lambda size: self._step_s(size, priced.sessions), priced.tokens)
        if self._draft_threshold.threshold == PAUSE:
            self._trial.cancel()  # the price has answered
        elif priced.inconclusive:
            self._trial.skip_step(priced.sessions)
        elif compared is None:
            self._trial.observe_other(step.sessions)
        else:
            self._trial.observe(compared)
        return self.threshold != before

    def observe_prefill_step(self) -> bool:
        """A step with prefill ended. Returns whether the threshold changed."""
        before = self.threshold
        self._trial.observe_other()
        return self.threshold != before

    def hold_s(
        self,
        step: PlannedStep,
        expected: Mapping[Key, ExpectedGain],
        awaited: Mapping[Key, tuple[DelayDistribution, float]],
        waited_s: float,
        most_s: float = math.inf,
    ) -> float:
        """Seconds for which holding the step pays (`wait_time.wait_s`), after `waited_s` of them, and at most `most_s`
        in all. `expected`: of the sessions for which candidates are on their way; `awaited`: how long those of each
        take, and for how many seconds they have been awaited."""
        self._gain_ratio.observe(expected)
        ratio = self._gain_ratio.value
        gains = {key: gain for key, each in expected.items() if (gain := each.gain * ratio - each.cost) > 0.0}
        most_s = min(most_s, self._max_wait_s, MAX_WAIT_STEPS * step.seconds) - waited_s
        held_s = wait_s(self.rate(step), _grouped(gains, awaited, most_s), most_s, TIMER_S)
        if any(awaited[key][0].unknown for key in gains):
            held_s = max(held_s, min(most_s, step.seconds - waited_s))
        if held_s > 0.0:
            self._gain_ratio.start_wait(expected)
        return held_s

    def expected_gain(
        self,
        version: int,
        paths: Sequence[float],
        parents: Sequence[int],
        own: Sequence[bool],
        limit: int,
        tenant: str = "",
    ) -> ExpectedGain:
        """Estimates the gain of a session of the tenant by one more candidate of the awaited source. It is expected
        below the likeliest leaf of the source's own candidates, the root if it sent none, and gains where the text gets
        there and by no candidate any further. `paths`: path probabilities of the session's best candidates, of which
        the step takes the first; of these, `parents`: their parents, by index, and `own`: whether the source sent them;
        `limit`: most that a step takes; `version`: of its tree."""
        count, cost = len(parents), self.candidate_price
        inner = {parent for parent, sent in zip(parents, own, strict=True) if sent}
        leaf = next((node for node, sent in enumerate(own) if sent and node not in inner), ROOT)  # best first
        further = sum([path for parent, path in zip(parents, paths, strict=False) if parent == leaf])
        there = 1.0 if leaf == ROOT else paths[leaf]
        gain = max(0.0, there - further) * (self._acceptance[tenant].value or 0.0)
        if count >= limit or len(paths) > count:
            cost = max(cost, paths[min(count, len(paths) - 1)])
        return ExpectedGain(version, sum(paths[:count]), gain, cost)

    def rate(self, step: PlannedStep) -> float:
        """Tokens committed a second lately, waiting included; before the first step, the rate of `step`. Never below
        the rate without candidates: else waits in vain would lower the rate and so justify further waits."""
        lately = (self._tokens.value or step.tokens) / max(self._seconds.value or step.seconds, 1e-9)
        return max(lately, step.sessions / max(self._step_s(step.sessions, step.sessions), 1e-9))


class GainRatio(Generic[Key]):
    """Tokens that arrive during a wait for each token expected of one more candidate.

    The expectation is for one candidate below the likeliest leaf. A frame may hold several, on many branches of a tree,
    or none that the step has room for. So a wait is measured once candidates came: worth of the step's candidates
    now less their worth before, over the sessions whose tree changed.
    """

    def __init__(self) -> None:
        self._ratio = RunningAverage(1.0)
        self._expected: Mapping[Key, ExpectedGain] = {}

    @property
    def value(self) -> float:
        return max(MIN_GAIN_RATIO, self._ratio.value or 0.0)

    def start_wait(self, expected: Mapping[Key, ExpectedGain]) -> None:
        """Called when a step is held back, with the expectations of its sessions."""
        self._expected = expected

    def observe(self, expected: Mapping[Key, ExpectedGain]) -> None:
        """Called when the step is planned again, with the new expectations of its sessions."""
        arrived = [
            (now.worth - before.worth, before.gain)
            for key, now in expected.items()
            if (before := self._expected.get(key)) is not None and now.version != before.version
        ]
        self._expected = {}
        total = sum(gain for _, gain in arrived)
        if total > 0.0:
            self._ratio.add(min(max(sum(worth for worth, _ in arrived) / total, 0.0), MAX_GAIN_RATIO))


def _grouped(
    gains: Mapping[Key, float], awaited: Mapping[Key, tuple[DelayDistribution, float]], most_s: float
) -> list[Awaited]:
    """Groups the sessions that have awaited answers of one distribution for equally long: most sessions of a step have,
    because their commits are sent to the drafter at once."""
    groups: dict[tuple[DelayDistribution, int], tuple[float, list[float]]] = {}
    for key, gain in gains.items():
        delays, passed = awaited[key]
        groups.setdefault((delays, delay_bin(passed)), (passed, []))[1].append(gain)
    return [
        Awaited(sum(some), delays.expected(passed, most_s), len(some)) for (delays, _), (passed, some) in groups.items()
    ]
