"""Whether a step waits for candidates, and which are worth sending: by what the steps before it brought and took.

Pure, so that the plan's simulation (`capacity`) waits and prices by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol

from verifier_svc.wait_policy.arrival_gain import ArrivalGains, ExpectedGain, Key
from verifier_svc.wait_policy.arrival_times import DelayDistribution, place
from verifier_svc.wait_policy.average import Average
from verifier_svc.wait_policy.draft_threshold import DraftThreshold
from verifier_svc.wait_policy.wait_time import Awaited, wait_s

FIRST_GUESS = 0.6
"""Share of candidates accepted that is assumed before any was measured."""
TIMER_S = 0.001
"""Event loops round their timers up to whole milliseconds."""
LONGEST_WAIT_STEPS = 2.0
"""No wait is longer than this many steps, whatever a drafter promises."""


class DecodeStep(Protocol):
    """A planned step without prefill."""

    @property
    def sessions(self) -> int: ...

    @property
    def tokens(self) -> float:
        """That it commits, in expectation."""

    @property
    def seconds(self) -> float:
        """That it takes, in expectation."""


class WaitPolicy(Generic[Key]):
    """Of one verifier."""

    def __init__(self, threshold: float, max_wait_s: float, seconds: Callable[[int, int], float]) -> None:
        """`threshold`: the lowest path probability that drafters are told; `seconds` of a step of so many tokens of so
        many sessions."""
        self._max_wait_s = max_wait_s
        self._step_s = seconds
        self._price = DraftThreshold(threshold)
        self._promise = ArrivalGains[Key]()
        self._acceptance = Average(FIRST_GUESS)
        self._tokens, self._seconds = Average(), Average()

    @property
    def price(self) -> float:
        """Tokens that one more candidate costs the step that takes it."""
        return self._price.average

    @property
    def threshold(self) -> float:
        """Path probability that candidates must have."""
        return self._price.threshold

    def judged(self, accepted: int, refused: bool) -> None:
        """So many of a session's candidates were accepted, and whether one was refused behind them."""
        self._acceptance.add(accepted / max(1, accepted + refused))

    def timed(self, step: DecodeStep, tokens: int, seconds: float) -> bool:
        """The step, of so many tokens, took so long, waiting included. Whether the threshold changed."""
        self._tokens.add(step.tokens)
        self._seconds.add(seconds)
        return self._price.observe(self._rate(step), lambda size: self._step_s(size, step.sessions), tokens)

    def pause(
        self,
        step: DecodeStep,
        hopes: Mapping[Key, ExpectedGain],
        awaited: Callable[[Key], tuple[DelayDistribution, float] | None],
        waited_s: float,
    ) -> float:
        """Seconds worth waiting before the step for what its sessions hope for (`waiting.wait_s`), having waited so
        long already. `awaited`: how long a session's candidates take and have been awaited; None: none are to come."""
        self._promise.look(hopes)
        ratio = self._promise.ratio
        gains = {session: gain for session, hope in hopes.items() if (gain := hope.gain * ratio - hope.cost) > 0.0}
        most_s = min(self._max_wait_s, LONGEST_WAIT_STEPS * step.seconds) - waited_s
        pause = wait_s(self._rate(step), _together(gains, awaited, most_s), most_s, TIMER_S)
        if pause > 0.0:
            self._promise.wait(hopes)
        return pause

    def hope(self, version: int, paths: Sequence[float], parents: Sequence[int], limit: int) -> ExpectedGain:
        """What one more candidate is worth to a session, if it hangs below the likeliest leaf. `paths`: the path
        probabilities of its best candidates, of which the step takes the first; `parents`: places of those in the same
        order; `limit`: most that a step takes; `version`: of its tree."""
        inner, count = set(parents), len(parents)
        leaves = [path for node, path in enumerate(paths[:count]) if node not in inner]
        gain, cost = max(leaves, default=1.0) * (self._acceptance.value or 0.0), self.price
        if count >= limit or len(paths) > count:
            cost = max(cost, paths[min(count, len(paths) - 1)])
        return ExpectedGain(version, sum(paths[:count]), gain, cost)

    def _rate(self, step: DecodeStep) -> float:
        """Tokens committed a second lately, waiting included; before the first step, by this one. No less than without
        any candidates: a verifier that waits in vain must not take its slowness for what its time is worth."""
        lately = (self._tokens.value or step.tokens) / max(self._seconds.value or step.seconds, 1e-9)
        return max(lately, step.sessions / max(self._step_s(step.sessions, step.sessions), 1e-9))


def _together(
    gains: Mapping[Key, float], awaited: Callable[[Key], tuple[DelayDistribution, float] | None], most_s: float
) -> list[Awaited]:
    """What the sessions await, those together that await the same for as long: the sessions of one step are mostly
    asked at once."""
    groups: dict[tuple[DelayDistribution, int], tuple[float, list[float]]] = {}
    for session, gain in gains.items():
        if each := awaited(session):
            delays, passed = each
            groups.setdefault((delays, place(passed)), (passed, []))[1].append(gain)
    return [
        Awaited(sum(some), delays.expected(passed, most_s), len(some)) for (delays, _), (passed, some) in groups.items()
    ]
