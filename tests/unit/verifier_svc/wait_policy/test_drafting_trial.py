"""Whether drafting pays, found by trial on made-up rates, exact or noisy: what is decided and what finding it costs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from slipstream.engine.emulated.model import LinearCost
from verifier_svc.wait_policy.draft_threshold import LEVELS, PAUSE
from verifier_svc.wait_policy.drafting_trial import (
    BEFORE,
    DEVIATION,
    LATEST,
    LEAST_GAIN,
    MOST_OTHERS,
    MOST_TRIALS,
    SETTLE,
    TRIED,
    ComparedStep,
    DraftingTrial,
    mean_and_error,
)
from verifier_svc.wait_policy.wait_policy import WaitPolicy

FIRST = SETTLE + BEFORE + SETTLE + TRIED + SETTLE
"""Steps until the first trial has ended, where nothing says that it would lose much."""


def plain_s(sessions: int) -> float:
    """Seconds of a plain step, as the cost curve predicts them."""
    return 0.010 + 0.001 * sessions


@dataclass
class Verifier:
    """Commits `ratio` times as many tokens a second with drafting as without; a plain step takes `host` times what the
    curve predicts."""

    ratio: float
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's seconds."""
    host: float = 1.0
    seed: int = 0
    trial: DraftingTrial = field(default_factory=lambda: DraftingTrial(plain_s))
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    """Steps with drafting."""
    trials: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, steps: int, sessions: int = 4) -> Verifier:
        for _ in range(steps):
            drafting, trying = self.trial.drafting, self.trial.trying
            tokens = 2 * sessions if drafting else sessions
            rate = sessions / (self.host * plain_s(sessions)) * (self.ratio if drafting else 1.0)
            seconds = tokens / rate * math.exp(self._random.gauss(0.0, self.noise))
            self.trial.observe(ComparedStep(sessions, tokens, seconds, candidates=drafting))
            self.tokens += tokens
            self.seconds += seconds
            self.drafted += drafting
            self.trials += self.trial.trying and not trying
        return self

    @property
    def answer(self) -> bool:
        """Whether drafting is held to be better."""
        return self.trial.drafting is not self.trial.trying

    def rate_of_best(self) -> float:
        """Tokens a second as a share of what the better of the two would give to four sessions."""
        return self.tokens / self.seconds * self.host * plain_s(4) / 4 / max(1.0, self.ratio)


@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.84, 0.9])
def test_drafting_that_loses_is_off_after_a_few_trials(ratio: float) -> None:
    verifier = Verifier(ratio, host=1.3).run(4 * FIRST)
    assert not verifier.answer and verifier.trials <= 3


@pytest.mark.parametrize("ratio", [1.1, 1.5, 2.0, 3.0])
def test_drafting_that_pays_stays(ratio: float) -> None:
    verifier = Verifier(ratio, host=1.3).run(20_000)
    assert verifier.answer and verifier.trials >= 2
    assert verifier.drafted > (0.9 if ratio < 1.2 else 0.98) * 20_000


@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9, 1.1, 1.5, 2.0, 3.0])
def test_trials_cost_less_than_one_percent(ratio: float) -> None:
    """After the first answers, which a verifier needs once for each load."""
    verifier = Verifier(ratio, host=1.3).run(4 * FIRST)
    verifier.tokens, verifier.seconds, verifier.trials = 0, 0.0, 0
    verifier.run(100_000)
    assert verifier.trials >= 5
    assert 0.99 < verifier.rate_of_best() < 1.0


def test_what_clearly_beats_the_predicted_plain_step_is_not_tried_early() -> None:
    assert Verifier(2.0).run(1000).trials == 0
    assert Verifier(2.0).run(6000).trials == 1
    assert Verifier(0.9).run(FIRST).trials == 1


@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.5, 2.0])
def test_noise_does_not_hide_what_is_better(ratio: float) -> None:
    """A step's time varies by a third."""
    runs = [Verifier(ratio, noise=0.3, host=1.3, seed=seed).run(10_000) for seed in range(20)]
    right = [run.drafted / 10_000 if ratio > 1.0 else 1.0 - run.drafted / 10_000 for run in runs]
    assert min(right) > 0.8 and sum(right) / len(right) > 0.93


def test_where_both_are_equal_the_question_rests_after_a_few_trials() -> None:
    """Without rests there would be one trial in FIRST steps."""
    for seed in range(5):
        assert 10 <= Verifier(1.0, noise=0.3, seed=seed).run(20_000).trials <= 0.8 * 20_000 / FIRST


def test_one_accident_decides_nothing() -> None:
    """A step with drafting takes a second; the next trial answers."""
    verifier = Verifier(1.4, host=1.5).run(SETTLE + BEFORE - 1)
    verifier.trial.observe(ComparedStep(4, 8, 1.0, candidates=True))
    assert verifier.trial.trying
    verifier.run(SETTLE + TRIED)
    assert not verifier.trial.trying and verifier.trial.drafting
    verifier.run(FIRST)
    assert verifier.trial.drafting and verifier.trials >= 1


@pytest.mark.parametrize(("before", "after"), [(0.7, 1.4), (1.4, 0.7)])
def test_a_change_is_found(before: float, after: float) -> None:
    verifier = Verifier(before, host=1.5).run(2000)
    assert verifier.answer == (before > 1.0)
    verifier.ratio = after
    assert verifier.run(8000).answer == (after > 1.0)


def test_each_load_has_an_answer_of_its_own_which_is_kept() -> None:
    verifier = Verifier(0.7).run(3 * FIRST, sessions=4)
    assert not verifier.trial.drafting
    verifier.ratio = 1.4
    verifier.run(30, sessions=1)
    assert not verifier.trial.drafting  # until it is tried
    verifier.run(4 * FIRST, sessions=1)
    assert verifier.trial.drafting
    verifier.ratio = 0.7
    trials = verifier.trials
    verifier.run(30, sessions=4)
    assert not verifier.trial.drafting and verifier.trials == trials


def test_a_load_that_is_new_is_tried_soon() -> None:
    """The rest after a clear answer for four sessions takes thousands of steps."""
    verifier = Verifier(0.6).run(3 * FIRST, sessions=4)
    trials = verifier.trials
    assert verifier.run(2 * FIRST, sessions=4).trials == trials
    assert verifier.run(2 * FIRST, sessions=16).trials > trials


def test_a_few_sessions_more_or_less_are_the_same_load() -> None:
    verifier = Verifier(0.7)
    for number in range(6 * FIRST):
        verifier.run(1, sessions=5 + number % 3)
    assert not verifier.trial.drafting
    assert verifier.trials == 2


def test_sessions_of_the_two_sides_may_differ() -> None:
    """A step of six takes a seventh longer than one of four: taken as equal, plain steps of four would look better."""
    verifier = Verifier(1.05)
    for _ in range(6 * FIRST):
        verifier.run(1, sessions=6 if verifier.trial.drafting else 4)
    assert verifier.answer and verifier.trials >= 1


def test_a_curve_that_learns_in_a_trial_does_not_hide_what_it_learnt() -> None:
    """Contended steps have made it dear, the trial's make it cheap."""
    level = 1.0
    trial = DraftingTrial(lambda sessions: level * plain_s(sessions))
    verifier = Verifier(0.7, trial=trial, host=1.4)
    for _ in range(3 * FIRST):
        level = 1.4 if trial.drafting else 1.0
        verifier.run(1)
    assert not trial.drafting


def test_drafting_is_not_judged_before_candidates_come() -> None:
    """A drafter that was off has to read what was committed since."""
    trial = DraftingTrial(plain_s)
    Verifier(0.7, trial=trial).run(3 * FIRST)
    while not trial.trying:
        trial.observe(ComparedStep(4, 4, plain_s(4), candidates=False))
    for _ in range(LATEST):
        trial.observe(ComparedStep(4, 4, 3 * plain_s(4), candidates=False))
    assert trial.trying
    for _ in range(TRIED):
        trial.observe(ComparedStep(4, 12, plain_s(4), candidates=True))
    assert not trial.trying
    trial.observe(ComparedStep(4, 4, plain_s(4), candidates=False))
    while not trial.trying:  # it was better, so the next trial comes soon, and confirms it
        trial.observe(ComparedStep(4, 4, plain_s(4), candidates=False))
    for _ in range(SETTLE + TRIED):
        trial.observe(ComparedStep(4, 12, plain_s(4), candidates=True))
    assert trial.drafting and not trial.trying


def test_a_trial_of_steps_that_cannot_be_compared_is_given_up() -> None:
    verifier = Verifier(0.9).run(SETTLE + BEFORE)
    assert verifier.trial.trying and not verifier.trial.drafting
    for _ in range(MOST_OTHERS):
        verifier.trial.observe_other()
    assert verifier.trial.trying
    verifier.trial.observe_other()
    assert not verifier.trial.trying and verifier.trial.drafting


def test_the_mean_of_more_trials_is_surer() -> None:
    assert mean_and_error([0.1]) == (0.1, DEVIATION)
    mean, error = mean_and_error([0.1] * MOST_TRIALS)
    assert mean == pytest.approx(0.1) and error < DEVIATION / 4
    assert mean - error > LEAST_GAIN
    assert mean_and_error([-0.5, 0.7])[1] > 0.3


# In the wait policy.


@dataclass(frozen=True)
class Planned:
    sessions: int = 4
    tokens: float = 4.0
    seconds: float = 0.014


def observe(policy: WaitPolicy[str], *, slope: bool = False, compared: bool = True) -> bool:
    """A step of a verifier in which drafting loses a quarter."""
    drafting = policy.threshold < PAUSE
    seconds = 2 * plain_s(4) / 0.75 if drafting else plain_s(4)
    step = ComparedStep(4, 8 if drafting else 4, seconds, drafting) if compared else None
    return policy.observe_step(Planned(), 12 if drafting else 4, seconds, step)


def policy_of(cost: LinearCost) -> WaitPolicy[str]:
    return WaitPolicy[str](LEVELS[0], 0.25, cost)


FLAT, PROPORTIONAL = LinearCost(0.014), LinearCost(0.0, 0.0035)


def test_drafters_are_told_to_pause_in_a_trial_and_where_drafting_does_not_pay() -> None:
    policy, told = policy_of(FLAT), list[tuple[bool, str]]()
    for _ in range(3 * FIRST):
        if observe(policy):
            told.append((policy.threshold == PAUSE, policy.pause_cause))
    assert told == [(True, "trial"), (False, ""), (True, "trial")]
    assert policy.threshold == PAUSE and policy.pause_cause == "slower"


def test_where_nothing_is_speculated_there_is_no_trial() -> None:
    policy = policy_of(FLAT)
    assert not any(observe(policy, compared=False) for _ in range(10 * FIRST))
    assert policy.threshold < PAUSE


def test_where_the_price_pauses_drafters_there_is_no_trial() -> None:
    policy = policy_of(PROPORTIONAL)
    changes = [observe(policy) for _ in range(10 * FIRST)]
    assert sum(changes) == 1 and policy.pause_cause == "price"


def test_a_price_that_pauses_drafters_ends_a_trial() -> None:
    cost = FLAT
    policy = WaitPolicy[str](LEVELS[0], 0.25, lambda tokens, sessions: cost(tokens, sessions))
    while policy.pause_cause != "trial":
        observe(policy)
    cost = PROPORTIONAL
    while policy.pause_cause != "price":
        observe(policy)
    cost = LinearCost(0.014)
    while policy.pause_cause == "price":
        observe(policy)
    assert policy.pause_cause == ""


def test_prefill_alone_does_not_leave_a_trial_waiting() -> None:
    policy = policy_of(FLAT)
    while policy.pause_cause != "trial":
        observe(policy)
    assert [policy.observe_prefill_step() for _ in range(MOST_OTHERS + 1)] == [False] * MOST_OTHERS + [True]
    assert policy.threshold < PAUSE
