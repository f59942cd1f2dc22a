"""How much drafting slows steps, found by trial on made-up times, exact or noisy: what is found and what finding it
costs."""

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
    MOST_OTHERS,
    MOST_TRIALS,
    REST,
    SETTLE,
    TRIED,
    ComparedStep,
    DraftingTrial,
    mean_and_error,
)
from verifier_svc.wait_policy.session_drafting import SessionDrafting
from verifier_svc.wait_policy.wait_policy import DraftedRound, WaitPolicy

FIRST = SETTLE + BEFORE + SETTLE + TRIED + SETTLE
"""Steps until the first trial has ended, where nothing says that it would lose much."""


def step_s(tokens: int, sessions: int) -> float:
    """Seconds of a step, as the cost curve predicts them."""
    return 0.010 + 0.0005 * sessions + 0.0005 * tokens


@dataclass
class Verifier:
    """A step takes `slowdown` times as long with drafting as without, and `host` times what the curve predicts. Each
    session commits `gain` tokens a step by one candidate."""

    slowdown: float
    gain: float = 1.0
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's seconds."""
    host: float = 1.0
    seed: int = 0
    trial: DraftingTrial = field(default_factory=lambda: DraftingTrial(step_s))
    tokens: float = 0.0
    seconds: float = 0.0
    trials: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._owed = 0.0

    @property
    def pays(self) -> bool:
        """Whether sessions draft, as far as the slowdown decides it."""
        return self.gain >= self.trial.slowdown or self.trial.slowdown <= 1.03

    def run(self, steps: int, sessions: int = 4) -> Verifier:
        for _ in range(steps):
            paying, trying = self.pays, self.trial.trying
            drafting = paying and not trying
            computed = 2 * sessions if drafting else sessions
            seconds = self.host * step_s(computed, sessions) * (self.slowdown if drafting else 1.0)
            seconds *= math.exp(self._random.gauss(-(self.noise**2) / 2, self.noise))  # 1 on average
            self._owed += sessions * (self.gain * self._candidates(sessions) if drafting else 1.0)
            tokens = math.floor(self._owed)
            self._owed -= tokens
            if paying:
                self.trial.observe(ComparedStep(sessions, tokens, computed, seconds))
            else:
                self.trial.observe_other(sessions)
            self.tokens += tokens
            self.seconds += seconds
            self.trials += self.trial.trying and not trying
        return self

    @staticmethod
    def _candidates(sessions: int) -> float:
        """Tokens that pay for the candidates' own time: `gain` is beyond that."""
        return step_s(2 * sessions, sessions) / step_s(sessions, sessions)

    def rate_of_best(self, sessions: int = 4) -> float:
        """Tokens a second as a share of what the better of drafting and plain decoding would give."""
        plain = sessions / (self.host * step_s(sessions, sessions))
        return self.tokens / self.seconds / (plain * max(1.0, self.gain / self.slowdown))


@pytest.mark.parametrize("slowdown", [1.0, 1.05, 1.3, 1.8])
@pytest.mark.parametrize("gain", [1.0, 1.6, 3.0])
def test_the_slowdown_is_found_whatever_texts_gain(slowdown: float, gain: float) -> None:
    verifier = Verifier(slowdown, gain, host=1.3)
    while verifier.trial.slowdown == 1.0 and verifier.tokens < 200_000:
        verifier.run(1)
    assert verifier.trial.slowdown == pytest.approx(slowdown, rel=0.01)


@pytest.mark.parametrize("slowdown", [1.3, 1.8])
def test_where_drafting_gains_nothing_a_few_trials_find_it(slowdown: float) -> None:
    verifier = Verifier(slowdown).run(4 * FIRST)
    assert not verifier.pays and verifier.trials <= 3


@pytest.mark.parametrize(("slowdown", "gain"), [(1.3, 1.0), (1.8, 1.0), (1.8, 1.5), (1.1, 1.5), (1.0, 2.0), (1.3, 3.0)])
def test_trials_cost_less_than_two_percent(slowdown: float, gain: float) -> None:
    """After the first answers, which a verifier needs once for each load."""
    verifier = Verifier(slowdown, gain, host=1.3).run(4 * FIRST)
    verifier.tokens, verifier.seconds, verifier.trials = 0.0, 0.0, 0
    verifier.run(100_000)
    assert verifier.trials >= 2
    assert 0.98 < verifier.rate_of_best() <= 1.001


def test_drafting_that_clearly_beats_the_predicted_plain_step_is_not_tried_early() -> None:
    assert Verifier(1.0, 2.0).run(1000).trials == 0
    assert Verifier(1.0, 2.0).run(6000).trials == 1
    assert Verifier(1.1, 0.9).run(FIRST).trials == 1


@pytest.mark.parametrize(("slowdown", "gain"), [(1.0, 1.0), (1.0, 1.5), (1.5, 1.0), (1.2, 1.6)])
def test_noise_does_not_hide_what_is_better(slowdown: float, gain: float) -> None:
    """A step's time varies by a third."""
    runs = [Verifier(slowdown, gain, noise=0.3, host=1.3, seed=seed).run(10_000) for seed in range(20)]
    shares = [run.rate_of_best() for run in runs]
    assert min(shares) > 0.93 and sum(shares) / len(shares) > 0.97


def test_where_drafting_and_plain_steps_are_equal_trials_become_rare() -> None:
    """Without rests there would be one trial in FIRST steps."""
    for seed in range(5):
        assert 3 <= Verifier(1.0, noise=0.3, seed=seed).run(20_000).trials <= 0.8 * 20_000 / FIRST


def test_one_slow_step_does_not_decide_a_trial() -> None:
    """A step with drafting takes a second; further trials answer."""
    verifier = Verifier(1.0, 1.1, host=1.5).run(SETTLE + BEFORE - 1)
    verifier.trial.observe(ComparedStep(4, 8, 8, 1.0))
    while verifier.trials < 3:
        verifier.run(1)
        assert verifier.pays


@pytest.mark.parametrize(("before", "after"), [(1.5, 1.0), (1.0, 1.5)])
def test_a_change_of_the_slowdown_is_found(before: float, after: float) -> None:
    verifier = Verifier(before, 1.2, host=1.5).run(2000)
    assert verifier.pays == (before == 1.0)
    verifier.slowdown = after
    assert verifier.run(40_000).pays == (after == 1.0)


def test_each_load_keeps_a_measured_slowdown_of_its_own() -> None:
    verifier = Verifier(1.4).run(3 * FIRST, sessions=4)
    assert verifier.trial.slowdown == pytest.approx(1.4, rel=0.01)
    verifier.slowdown, verifier.gain = 1.1, 1.6
    verifier.run(1, sessions=1)
    assert verifier.trial.slowdown == pytest.approx(1.4, rel=0.01)  # until it is tried
    verifier.run(9000, sessions=1)
    assert verifier.trial.slowdown == pytest.approx(1.1, rel=0.01)
    trials = verifier.trials
    verifier.run(30, sessions=4)
    assert verifier.trial.slowdown == pytest.approx(1.4, rel=0.01) and verifier.trials == trials


def test_a_few_sessions_more_or_less_are_the_same_load() -> None:
    verifier = Verifier(1.4)
    for number in range(6 * FIRST):
        verifier.run(1, sessions=5 + number % 3)
    assert not verifier.pays
    assert verifier.trials <= 2


def test_sessions_of_the_two_sides_may_differ() -> None:
    """A step of six takes longer than one of four: taken as equal, plain steps of four would look better."""
    verifier = Verifier(1.0)
    for _ in range(6 * FIRST):
        verifier.run(1, sessions=4 if verifier.trial.trying else 6)
    assert verifier.pays and verifier.trials >= 1


def test_a_cost_curve_that_changes_during_a_trial_does_not_hide_the_slowdown() -> None:
    """Contended steps have made it dear, the trial's make it cheap."""
    level = 1.0
    trial = DraftingTrial(lambda tokens, sessions: level * step_s(tokens, sessions))
    verifier = Verifier(1.4, trial=trial, host=1.4)
    for _ in range(3 * FIRST):
        level = 1.0 if trial.trying or not verifier.pays else 1.4
        verifier.run(1)
    assert not verifier.pays


def test_drafting_is_not_measured_before_candidates_come() -> None:
    """A drafter that was off has to read what was committed since."""
    trial = DraftingTrial(step_s)
    for _ in range(LATEST):
        trial.observe(ComparedStep(4, 4, 4, 3 * step_s(4, 4)))
    for _ in range(BEFORE):
        trial.observe(ComparedStep(4, 4, 8, step_s(8, 4)))
    assert trial.trying
    for _ in range(SETTLE + TRIED):
        trial.observe(ComparedStep(4, 4, 4, step_s(4, 4)))
    assert not trial.trying and trial.slowdown == pytest.approx(1.0)


def test_a_trial_is_given_up_after_too_many_incomparable_steps() -> None:
    verifier = Verifier(1.1).run(SETTLE + BEFORE)
    assert verifier.trial.trying
    for _ in range(MOST_OTHERS):
        verifier.trial.observe_other()
    assert verifier.trial.trying
    verifier.trial.observe_other()
    assert not verifier.trial.trying and verifier.trial.slowdown == 1.0


def test_a_slowdown_expires_where_no_drafter_drafts_to_measure_it_again() -> None:
    verifier = Verifier(1.4).run(4 * FIRST)
    assert not verifier.pays
    steps = 0
    while not verifier.pays:
        verifier.run(1)
        steps += 1
    assert 40 * FIRST < steps < 100 * FIRST  # what finding it again costs is half a percent of that
    assert not verifier.run(4 * FIRST).pays


def test_a_slowdown_that_another_load_had_is_forgotten_too() -> None:
    verifier = Verifier(1.4).run(4 * FIRST, sessions=4)
    assert not verifier.pays
    verifier.run(100, sessions=32)
    assert not verifier.pays
    verifier.run(math.ceil(REST), sessions=32)
    assert verifier.trials > 2  # of this load


def test_the_mean_of_more_trials_has_a_smaller_error() -> None:
    assert mean_and_error([0.1]) == (0.1, DEVIATION)
    mean, error = mean_and_error([0.1] * MOST_TRIALS)
    assert mean == pytest.approx(0.1) and error < DEVIATION / 4
    assert mean_and_error([-0.5, 0.7])[1] > 0.3


# In the wait policy.


@dataclass(frozen=True)
class Planned:
    sessions: int = 4
    tokens: float = 4.0
    seconds: float = 0.014


def observe(policy: WaitPolicy[str], *, compared: bool = True) -> bool:
    """A step of a verifier which drafting slows by a third and whose texts gain nothing."""
    seconds = step_s(4, 4) * (1.33 if policy.threshold < PAUSE else 1.0)
    step = ComparedStep(4, 4, 4, seconds) if compared else None
    return policy.observe_step(Planned(), 4, seconds, step)


def policy_of(cost: LinearCost) -> WaitPolicy[str]:
    return WaitPolicy[str](LEVELS[0], 0.25, cost)


FLAT, PROPORTIONAL = LinearCost(0.014), LinearCost(0.0, 0.0035)


def test_drafters_pause_during_trials() -> None:
    policy, told = policy_of(FLAT), list[tuple[bool, str]]()
    for _ in range(2 * (LATEST + FIRST)):
        if observe(policy):
            told.append((policy.threshold == PAUSE, policy.pause_cause))
    assert told == [(True, "trial"), (False, "")] * 2
    assert policy.drafting_slowdown == pytest.approx(1.33)


def test_where_drafting_pays_for_no_session_that_is_the_cause() -> None:
    policy = policy_of(FLAT)
    policy.observe_step(Planned(), 4, 0.014, none_drafts=True)
    assert policy.pause_cause == "slower"
    policy.observe_step(Planned(), 4, 0.014)
    assert policy.pause_cause == ""


def test_where_drafting_slows_nothing_paused_sessions_resume() -> None:
    policy, session = policy_of(FLAT), SessionDrafting(drafting=False)
    rounds = [DraftedRound("one", session, 1, 0)]
    assert policy.observe_drafting(rounds, 1, 1) == ["one"] and session.drafting
    assert policy.observe_drafting(rounds, 1, 1) == []


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
