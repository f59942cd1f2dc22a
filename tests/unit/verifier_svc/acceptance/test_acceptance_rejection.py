"""Rejection sampling, by exact enumeration: every draft and every coin, weighted by its probability, must add up to
p.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from tests.support.enumeration import bias, chain, dense, draft_of, outcomes, run, target_of
from verifier_svc.acceptance.rejection import KeyedRandomness, rejection, residual
from verifier_svc.acceptance.result import FloatArray

VOCABULARY = 3


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(0, 3),
    support=st.integers(0, VOCABULARY),
    zeros=st.booleans(),
)
def test_the_joint_law_of_the_emitted_tokens_is_the_targets(seed: int, length: int, support: int, zeros: bool) -> None:
    target, draft = target_of(seed, VOCABULARY, zeros), draft_of(seed + 1, VOCABULARY, support)
    assert bias(rejection, target, draft, length) < 1e-12


@pytest.mark.parametrize("support", [0, 1, 2, 3])
def test_acceptance_is_the_overlap_of_p_and_q(support: int) -> None:
    target, draft = target_of(3, VOCABULARY), draft_of(4, VOCABULARY, support)
    p, q = target(()), dense(draft(()), VOCABULARY)
    accepted = 0.0
    for token in range(VOCABULARY):
        if q[token]:
            found = outcomes(rejection, chain((token,), draft), target)
            accepted += q[token] * sum(weight for verdict, weight in found if verdict.path)
    assert accepted == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


def test_a_drafter_with_a_false_q_changes_the_output() -> None:
    """So the tests above have teeth, and the rule is for trusted drafters only."""
    target, honest, lying = (
        target_of(5, VOCABULARY),
        draft_of(6, VOCABULARY, VOCABULARY),
        draft_of(7, VOCABULARY, VOCABULARY),
    )
    assert bias(rejection, target, honest, 2) < 1e-12
    assert bias(rejection, target, lying, 2, drawn=honest) > 1e-3


def test_a_token_outside_its_own_q_is_reported_and_replaced_by_a_draw_from_p() -> None:
    target = target_of(8, VOCABULARY)
    selection = chain((2,), lambda path: DraftDistribution((0, 1), (3, 4)))
    law = np.zeros(VOCABULARY)
    for verdict, weight in outcomes(rejection, selection, target):
        assert verdict.dishonest and verdict.path == ()
        law[verdict.next_token] += weight
    assert np.abs(law - target(())).max() < 1e-12


@pytest.mark.parametrize("proposal", [DraftDistribution((0, 1, 2), (1, 1, 2)), None])
def test_nothing_left_of_p_falls_back_to_p(proposal: DraftDistribution | None) -> None:
    p = np.array([0.25, 0.25, 0.5]) if proposal else np.array([0.0, 1.0, 0.0])
    assert residual(p, proposal, 1).tolist() == p.tolist()


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2**64 - 1))
def test_near_identical_single_precision_pairs_always_yield_a_possible_token(seed: int, noise_seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.integers(1, 65536, VOCABULARY)
    p = (weights / weights.sum()).astype(np.float32).astype(np.float64)
    token = int(generator.integers(VOCABULARY))
    selection = chain((token,), lambda path: DraftDistribution(tuple(range(VOCABULARY)), tuple(weights.tolist())))
    verdict = run(rejection, selection, KeyedRandomness(noise_seed, 5), lambda path: p)
    assert 0 <= verdict.next_token < VOCABULARY


def test_keyed_randomness_reproduces_the_law_and_itself() -> None:
    target, size = target_of(9, VOCABULARY), 20_000
    proposal = DraftDistribution((0, 1, 2), (5, 1, 1))
    q, p = dense(proposal, VOCABULARY), target(())
    drafts = np.random.default_rng(1).choice(VOCABULARY, size, p=q)
    observed = np.zeros(VOCABULARY)
    for position, token in enumerate(drafts.tolist()):
        verdict = run(rejection, chain((token,), lambda path: proposal), KeyedRandomness(11, position), target)
        observed[token if verdict.path else verdict.next_token] += 1
    assert scipy.stats.chisquare(observed, p * size).pvalue > 1e-4
    first, second = (
        run(rejection, chain((0,), lambda path: proposal), KeyedRandomness(11, 3), target) for _ in range(2)
    )
    assert first == second


def test_a_draw_follows_its_weights_and_its_noise_is_that_of_its_position() -> None:
    weights, size = np.array([1.0, 0.0, 2.0, 5.0]), 4000
    drawn = [KeyedRandomness(7, position).draw(0, weights, Purpose.RESIDUAL) for position in range(size)]
    observed = np.bincount(drawn, minlength=4)
    assert observed[1] == 0
    assert scipy.stats.chisquare(observed[[0, 2, 3]], weights[[0, 2, 3]] / 8 * size).pvalue > 1e-4
    below = [KeyedRandomness(7, position - 3).draw(3, weights, Purpose.RESIDUAL) for position in range(3, 40)]
    assert below == drawn[3:40]


class Recorded(KeyedRandomness):
    """Remembers for what tokens were drawn."""

    def __init__(self) -> None:
        super().__init__(7, 5)
        self.drawn: list[tuple[int, Purpose]] = []

    def draw(self, depth: int, weights: FloatArray, purpose: Purpose) -> int:
        self.drawn.append((depth, purpose))
        return super().draw(depth, weights, purpose)


@pytest.mark.parametrize(
    ("said", "q", "drawn"),
    [
        pytest.param(1, 1, (2, Purpose.BONUS), id="accepted"),
        pytest.param(2, 1, (1, Purpose.RESIDUAL), id="rejected"),
        pytest.param(1, 2, (1, Purpose.RESIDUAL), id="outside its own q"),
    ],
)
def test_each_token_has_the_noise_of_its_depth_and_purpose(said: int, q: int, drawn: tuple[int, Purpose]) -> None:
    """The target says 0 and then `said`; the drafter 0, and then 1 from a q that has `q` alone."""
    randomness = Recorded()
    proposals = {(): DraftDistribution((0,), (1,)), (0,): DraftDistribution((q,), (1,))}
    target = {(): np.eye(VOCABULARY)[0], (0,): np.eye(VOCABULARY)[said], (0, 1): np.ones(VOCABULARY) / VOCABULARY}
    run(rejection, chain((0, 1), proposals.__getitem__), randomness, target.__getitem__)
    assert randomness.drawn == [drawn]
