"""Finds out by trial whether drafting pays: pauses it for some steps, and compares what is committed with and without.

A price (`draft_threshold`) holds what candidates cost the verifier's own steps. Where drafters, gateway and clients run
on the verifier's cores, drafting also takes the time of those cores, and no cost curve shows that. So the verifier
measures: a *trial* is some steps of the other kind (without drafting while it is on, with it while it is off) right
after as many or more of the present kind.

**Like with like.** The sessions of a step change all the time. So a step is measured against a plain one of as many
sessions, whose duration the cost curve predicts: it commits `tokens / sessions` plain steps' worth of tokens in
`seconds / plain` plain steps' time, and the efficiency of several steps is the sum of the former over that of the
latter. Both sides of a comparison take the same curve, so what is wrong with its level cancels. The first steps after
a switch are not measured: candidates of before are still there, or none have come yet. What was found holds for about
so many sessions; for half or twice as many it is found anew.

**Noise.** Each trial gives the logarithm of a ratio of efficiencies. Trials follow each other until their mean is
further from zero than its standard error, so that one accident decides nothing; to change what is done it must exceed
LEAST_GAIN too.

**What trials cost.** A decided question rests until what its trials lost is SHARE of the time since. So a clear answer
is asked for rarely, and one near a draw often, where asking costs nothing. Before the first trial the cost curve says
what a plain step would lose: where drafting clearly beats the prediction, that one is late too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SETTLE = 8
"""Steps after a switch that are not measured."""
LATEST = 32
"""After so many, drafting is measured even if no candidate has come."""
TRIED = 32
"""Measured steps of a trial."""
BEFORE = 64
"""Measured steps of the present kind that it is compared with: they cost nothing, and texts differ."""
TRIAL = SETTLE + TRIED + SETTLE
"""Steps that lose by a trial: after it, trees have to grow again."""
MOST_OTHERS = 4 * TRIAL
"""Steps in a trial that cannot be compared, after which it is given up."""
MOST_TRIALS = 8
"""Trials for one answer; if they give none, what is done stays."""
LEAST_GAIN = 0.03
"""Logarithm of the ratio that is worth a change."""
DEVIATION = 0.15
"""Standard deviation of a trial's logarithm that is assumed at first; it counts as one trial's."""
MOST_RATIO = 0.7
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
    """A step without prefill, half of whose sessions or more are speculated for."""

    sessions: int
    tokens: int
    """Committed."""
    seconds: float
    """From the end of the step before to its own, waits included."""
    candidates: bool
    """True if the step verified candidates."""


def compared_step(
    sessions: int, speculating: int, tokens: int, seconds: float, *, candidates: bool
) -> ComparedStep | None:
    """The step as trials see it; None where fewer than half of its sessions are speculated for: it shows nothing of
    drafting."""
    return ComparedStep(sessions, tokens, seconds, candidates) if 2 * speculating >= sessions else None


@dataclass(slots=True)
class LoadVerdict:
    """What is done at one load, and the trials since that was decided."""

    drafting: bool
    rest: float | None = None
    """Plain steps' time before the next trial; None before the first answer."""
    passed: float = 0.0
    """Plain steps' time since the last trial."""
    lost: float = 0.0
    """Plain steps' time that the trials since the last answer cost."""
    results: list[float] = field(default_factory=list)
    """Logarithms of these trials: the efficiency in each over that before it."""


class DraftingTrial:
    def __init__(self, plain_s: Callable[[int], float]) -> None:
        """`plain_s` gives the seconds of a step of so many sessions without candidates."""
        self._plain_s = plain_s
        self._load: int | None = None
        """Binary logarithm of the sessions that the present answer is for."""
        self._sessions = 0.0
        self._answer = LoadVerdict(drafting=True)
        self._answers: dict[int, LoadVerdict] = {}
        """By load."""
        self.trying = False
        """Whether a trial is under way."""
        self._measured: list[ComparedStep] = []
        self._before: list[ComparedStep] = []
        """What was measured before the trial."""
        self._time = 0.0
        """Plain steps' time since drafting was switched, or a look at it."""
        self._count = self._others = 0
        """Steps since then, and those among further ones that cannot be compared."""
        self._came = False
        """Whether candidates have come since then."""

    @property
    def drafting(self) -> bool:
        """Whether drafters are to draft now."""
        return self._answer.drafting is not self.trying

    def observe(self, step: ComparedStep) -> None:
        self._follow_load(step.sessions)
        passed = step.seconds / max(self._plain_s(step.sessions), 1e-9)
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

    def observe_other(self) -> None:
        """A step that cannot be compared: with prefill, or most of its sessions without speculation."""
        if self.trying:
            self._others += 1
            if self._others > MOST_OTHERS:
                self.give_up()

    def hold(self, sessions: int) -> None:
        """A step that shows nothing, because one tenant has most of it: what is done is what was found for as many
        sessions as the others have."""
        self.give_up()
        self._sessions = max(1.0, float(sessions))
        self._load = round(math.log2(self._sessions))
        self._answer = self._answers.setdefault(self._load, LoadVerdict(drafting=True))

    def give_up(self) -> None:
        """Ends a trial without a result; what was measured is dropped."""
        if self.trying:
            self.trying = False
            self._answer.passed = 0.0
        self._start_measuring()

    @property
    def _settled(self) -> bool:
        if self._count <= SETTLE:
            return False
        return self._came or not self.drafting or self._count > LATEST

    def _follow_load(self, sessions: int) -> None:
        self._sessions += (sessions - self._sessions) * (WEIGHT if self._load is not None else 1.0)
        exact = math.log2(self._sessions)
        if self._load is None or abs(exact - self._load) > NEAR:
            self.give_up()
            self._load = round(exact)
            # A load that was never there begins with what was done last.
            self._answer = self._answers.setdefault(self._load, LoadVerdict(self._answer.drafting))

    def _start_measuring(self) -> None:
        self._measured.clear()
        self._time, self._count, self._others, self._came = 0.0, 0, 0, False

    def _look(self) -> None:
        """Enough is measured to compare a trial with."""
        answer, rest = self._answer, self._answer.rest
        if rest is None:
            # Drafting would lose what it commits beyond the plain steps that the curve predicts.
            lost = max(0.0, 1.0 - 1.0 / self._efficiency(self._measured)) if answer.drafting else 0.0
            rest = TRIAL * lost / SHARE
        self._before, self._measured = self._measured, []
        if answer.passed >= rest:
            self._start_measuring()
            self.trying = True

    def _end_trial(self) -> None:
        answer = self._answer
        # Both by the curve of now: it has learnt from the trial's steps.
        result = math.log(self._efficiency(self._measured) / self._efficiency(self._before))
        answer.results.append(min(max(result, -MOST_RATIO), MOST_RATIO))
        # Those that could not be compared passed in plain steps' time each, about, and trees have to grow again.
        answer.lost += (self._time + self._others + SETTLE) * (1.0 - math.exp(answer.results[-1]))
        answer.passed = 0.0
        mean, error = mean_and_error(answer.results)
        better = len(answer.results) > 1 and mean - error > LEAST_GAIN
        if better:
            answer.drafting = not answer.drafting
            answer.lost = TRIAL * (1.0 - math.exp(-mean))  # what a trial of what was done until now will cost
        self.trying = False
        if better or mean + error < 0.0 or len(answer.results) == MOST_TRIALS:
            answer.rest = max(REST, answer.lost / SHARE)
            answer.lost = 0.0
            answer.results.clear()
        else:
            answer.rest = 0.0
        self._start_measuring()

    def _efficiency(self, steps: Sequence[ComparedStep]) -> float:
        """1 is what the cost curve predicts of plain steps."""
        tokens = sum(step.tokens / step.sessions for step in steps)
        return tokens / max(sum(step.seconds / max(self._plain_s(step.sessions), 1e-9) for step in steps), 1e-9)


def mean_and_error(results: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, DEVIATION counting as one more result."""
    number, mean = len(results), sum(results) / len(results)
    variance = (DEVIATION**2 + sum((result - mean) ** 2 for result in results)) / number
    return mean, math.sqrt(variance / number)
