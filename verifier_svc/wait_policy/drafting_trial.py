"""Finds out by trial how much longer steps take because drafters draft, candidates aside: the *slowdown*.

A price (`draft_threshold`) holds what candidates cost the verifier's own steps. Where drafters, gateway and clients run
on the verifier's cores, drafting also takes the time of those cores, and no cost curve shows that. So the verifier
measures: for a *trial* all drafters pause for some steps, right after as many or more steps with drafting. Whether
drafting pays for a session is another question: its own rounds show what it gains (`session_drafting`).

**Like with like.** Sessions and candidates of a step change all the time, and texts differ. So a step is measured
against the duration that the cost curve predicts for its tokens and sessions, and the slowdown is the ratio of measured
to predicted seconds with drafting, over that ratio in the trial. Tokens committed play no part in it. Both sides take
the same curve, so what is wrong with its level cancels. The first steps after a switch are not measured: candidates of
before are still there, or none have come yet. What was found holds for about so many sessions; for half or twice as
many it is found anew.

**Noise.** Each trial gives the logarithm of a slowdown, in which a step that took much longer than others counts as
ACCIDENT times their median. Trials follow each other until their mean differs from what drafting gains, as the steps
before the trials showed it, by more than its standard error; that it gains less than it slows, no single one decides.

**What trials cost.** A decided question rests until what its trials lost is SHARE of the time since. So a clear answer
is asked for rarely, and one near a draw often, where asking costs nothing. Before the first trial the cost curve
predicts what a plain step would lose: where drafting clearly beats the prediction, that one is late too. Where no
session drafts any more when the rest ends, the slowdown is forgotten: sessions draft, and it is found again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SETTLE = 8
"""Steps after a switch that are not measured."""
LATEST = 32
"""Steps after a switch from which on drafting is measured even if no candidate has come."""
TRIED = 32
"""Measured steps of a trial."""
BEFORE = 64
"""Measured steps with drafting that a trial is compared with: they cost nothing."""
TRIAL = SETTLE + TRIED + SETTLE
"""Steps that lose by a trial: after it, trees have to grow again."""
MOST_OTHERS = 4 * TRIAL
"""Steps in a trial that cannot be compared, after which the trial is given up."""
MOST_TRIALS = 8
"""Trials for one answer; their mean is it then."""
DEVIATION = 0.1
"""Standard deviation of a trial's logarithm that is assumed at first; it counts as one trial's."""
ACCIDENT = 4.0
"""Times the median duration that a step counts as at most: something else stopped the process."""
MOST_SLOWDOWN = 0.7
"""Bound of a trial's logarithm: a factor of two is an accident or clear enough."""
SHARE = 0.005
"""Share of all time that trials may lose."""
REST = 1024.0
"""Least rest after an answer, in plain steps' time: where trials lose nothing, their switches may."""
WEIGHT = 0.1
"""Weight of a step's sessions in their average."""
NEAR = 0.75
"""Distance of two loads, in powers of two of sessions, within which one's answer holds for the other."""


class ComparedStep(NamedTuple):
    """A step without prefill, for half of whose sessions or more drafters draft, or would but for a trial."""

    sessions: int
    tokens: int
    """Tokens that the step committed."""
    computed: int
    """Tokens that the step computed: one for each session, and its candidates."""
    seconds: float
    """Seconds from the end of the step before to the step's own end, waits included."""

    @property
    def candidates(self) -> bool:
        """Whether the step verified any candidate."""
        return self.computed > self.sessions


def compared_step(sessions: int, drafting: int, tokens: int, computed: int, seconds: float) -> ComparedStep | None:
    """The step as trials see it; None where drafters draft for fewer than half of its sessions: that shows nothing."""
    return ComparedStep(sessions, tokens, computed, seconds) if 2 * drafting >= sessions else None


@dataclass(slots=True)
class LoadAnswer:
    """The slowdown at one load, and the trials since it was found."""

    slowdown: float = 0.0
    """Logarithm of the slowdown; 0 before the first answer."""
    rest: float | None = None
    """Plain steps' time before the next trial; None before the first answer."""
    passed: float = 0.0
    """Plain steps' time since the last trial."""
    lost: float = 0.0
    """Plain steps' time that the trials since the last answer cost."""
    results: list[float] = field(default_factory=list)
    """Logarithms of the slowdown that these trials found."""
    gains: list[float] = field(default_factory=list)
    """Logarithms of what drafting gained before each of them, by the cost curve."""


class DraftingTrial:
    def __init__(self, step_s: Callable[[int, int], float]) -> None:
        """`step_s` gives the seconds of a step from its tokens and sessions."""
        self._step_s = step_s
        self._load: int | None = None
        """Binary logarithm of the sessions that the present answer is for."""
        self._sessions = 0.0
        self._answer = LoadAnswer()
        self._answers: dict[int, LoadAnswer] = {}
        """Answers by load, which is the binary logarithm of a number of sessions."""
        self.trying = False
        """Whether a trial is under way: drafters pause."""
        self._measured: list[ComparedStep] = []
        self._before: list[ComparedStep] = []
        """Steps measured before the trial."""
        self._time = 0.0
        """Plain steps' time since drafting was switched, or a look at it."""
        self._count = self._others = 0
        """Steps since then, and those among further ones that cannot be compared."""
        self._came = False
        """Whether candidates have come since then."""

    @property
    def slowdown(self) -> float:
        """Seconds that steps of as many sessions take for each second that they would take without drafting."""
        return math.exp(self._answer.slowdown)

    def observe(self, step: ComparedStep) -> None:
        self._follow_load(step.sessions)
        passed = step.seconds / self._predicted_s(step.sessions, step.sessions)
        self._answer.passed += passed
        self._time += passed
        self._count += 1
        self._came = self._came or step.candidates
        if not self._settled:
            return
        self._measured.append(step)
        if self.trying:
            if len(self._measured) == TRIED:
                self._end_trial()
        elif len(self._measured) == BEFORE:
            self._look()

    def observe_other(self, sessions: int | None = None) -> None:
        """A step that cannot be compared: most of its sessions are not drafted for, or it has prompts (None)."""
        if sessions is not None:
            self._follow_load(sessions)
        answer = self._answer
        answer.passed += 1.0  # a plain step, or nearly
        if self.trying:
            self._others += 1
            if self._others > MOST_OTHERS:
                self.cancel()
        elif answer.slowdown and answer.passed >= (REST if answer.rest is None else answer.rest):
            answer.slowdown = 0.0

    def skip_step(self, sessions: int) -> None:
        """Ends a trial for a step that shows nothing, because one tenant has most of it: the slowdown is what was found
        for as many sessions as the others have."""
        self.cancel()
        self._sessions = max(1.0, float(sessions))
        self._load = round(math.log2(self._sessions))
        self._answer = self._answers.setdefault(self._load, LoadAnswer())

    def cancel(self) -> None:
        """Ends a trial without a result; what was measured is dropped."""
        if self.trying:
            self.trying = False
            self._answer.passed = 0.0
        self._start_measuring()

    @property
    def _settled(self) -> bool:
        if self._count <= SETTLE:
            return False
        return self._came or self.trying or self._count > LATEST

    def _follow_load(self, sessions: int) -> None:
        self._sessions += (sessions - self._sessions) * (WEIGHT if self._load is not None else 1.0)
        exact = math.log2(self._sessions)
        if self._load is None or abs(exact - self._load) > NEAR:
            self.cancel()
            self._load = round(exact)
            # A load that was never there begins with what was found last.
            self._answer = self._answers.setdefault(self._load, LoadAnswer(self._answer.slowdown))

    def _start_measuring(self) -> None:
        self._measured.clear()
        self._time, self._count, self._others, self._came = 0.0, 0, 0, False

    def _look(self) -> None:
        """Enough is measured to compare a trial with."""
        answer, rest = self._answer, self._answer.rest
        if rest is None:
            # A trial would lose what drafting commits beyond the plain steps that the curve predicts.
            plain = sum(step.seconds / self._predicted_s(step.sessions, step.sessions) for step in self._measured)
            tokens = sum(step.tokens / step.sessions for step in self._measured)
            rest = TRIAL * max(0.0, 1.0 - plain / tokens) / SHARE
        self._before, self._measured = self._measured, []
        if answer.passed >= rest:
            self._start_measuring()
            self.trying = True

    def _end_trial(self) -> None:
        answer = self._answer
        # Both by the curve of now: it has learnt from the trial's steps.
        slowdown = math.log(self._duration(self._before) / self._duration(self._measured))
        answer.results.append(min(max(slowdown, -MOST_SLOWDOWN), MOST_SLOWDOWN))
        answer.gains.append(math.log(self._gain(self._before)))
        net = [gain - result for gain, result in zip(answer.gains, answer.results, strict=True)]
        # Those that could not be compared passed in plain steps' time each, about, and trees have to grow again.
        answer.lost += (self._time + self._others + SETTLE) * (1.0 - math.exp(-net[-1]))
        answer.passed = 0.0
        mean, error = mean_and_error(net)
        self.trying = False
        if mean > error or (mean < -error and len(net) > 1) or len(net) == MOST_TRIALS:
            answer.slowdown = max(0.0, sum(answer.results) / len(answer.results))
            # Where drafting does not pay, to find that again takes as many steps with drafting.
            again = len(net) * (SETTLE + BEFORE) * (1.0 - math.exp(mean))
            answer.rest = max(REST, answer.lost / SHARE, again / SHARE)
            answer.lost = 0.0
            answer.results.clear()
            answer.gains.clear()
        else:
            answer.rest = 0.0
        self._start_measuring()

    def _duration(self, steps: Sequence[ComparedStep]) -> float:
        """Seconds of the steps over those that the cost curve predicts, on average."""
        ratios = [step.seconds / self._predicted_s(step.computed, step.sessions) for step in steps]
        most = ACCIDENT * statistics.median(ratios)
        return max(sum(min(ratio, most) for ratio in ratios) / len(ratios), 1e-9)

    def _gain(self, steps: Sequence[ComparedStep]) -> float:
        """Tokens that drafting commits for each that plain steps would, if it took no more than the curve predicts."""
        tokens = sum(step.tokens / step.sessions for step in steps)
        predicted_s = self._predicted_s
        plain = sum(
            predicted_s(step.computed, step.sessions) / predicted_s(step.sessions, step.sessions) for step in steps
        )
        return max(tokens, 1e-9) / max(plain, 1e-9)

    def _predicted_s(self, tokens: int, sessions: int) -> float:
        """Predicts a step's seconds by the cost curve, above 0."""
        return max(self._step_s(tokens, sessions), 1e-9)


def mean_and_error(results: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, DEVIATION counting as one more result."""
    number, mean = len(results), sum(results) / len(results)
    variance = (DEVIATION**2 + sum((result - mean) ** 2 for result in results)) / number
    return mean, math.sqrt(variance / number)
