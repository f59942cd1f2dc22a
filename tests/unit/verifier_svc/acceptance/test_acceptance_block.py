"""Block verification, by exact enumeration: the joint law of what is emitted is the target's, and at least as much
is accepted as by rejection.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.selection import Selection
from tests.enumeration import (
    Outcomes,
    Path,
    accepted,
    bias,
    chain,
    chains,
    draft_of,
    error,
    law_of,
    outcomes,
    rounds,
    run,
    target_of,
)
from verifier_svc.acceptance.block import RoundChance, block
from verifier_svc.acceptance.rejection import rejection
from verifier_svc.acceptance.result import AcceptanceResult, Distribution, FloatArray

VOCABULARY = 3


class StopsAtFirstFailure(Outcomes):
    """What two implementations and a reviewer elsewhere took the rule for: a failed coin fails all later ones."""

    failed = False

    def accepts(self, depth: int, probability: float, sibling: int = 0) -> bool:
        self.failed = self.failed or not super().accepts(depth, probability)
        return not self.failed


def stops_at_first_failure(
    selection: Selection, chance: Outcomes
) -> Generator[Distribution, FloatArray, AcceptanceResult]:
    """`block` with a chance that never lets a coin pass after one has failed."""
    mutant = StopsAtFirstFailure(chance.script)
    verdict = yield from block(selection, mutant)
    chance.weight, chance.alternatives = mutant.weight, mutant.alternatives
    return verdict


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(0, 3),
    support=st.integers(0, VOCABULARY),
    zeros=st.booleans(),
)
def test_the_joint_law_of_the_emitted_tokens_is_the_targets(seed: int, length: int, support: int, zeros: bool) -> None:
    target, draft = target_of(seed, VOCABULARY, zeros), draft_of(seed + 1, VOCABULARY, support)
    assert bias(block, target, draft, length) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_deterministic_and_drawn_nodes_mix(seed: int) -> None:
    target, drawn = target_of(seed, VOCABULARY), draft_of(seed, VOCABULARY, 3)

    def draft(path: Path) -> DraftDistribution | None:
        return drawn(path) if (len(path) + seed) % 2 else None

    assert bias(block, target, draft, 3) < 1e-12


@pytest.mark.parametrize("equal_at", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_where_p_equals_q_nothing_is_left_to_replace_by(equal_at: set[int]) -> None:
    other, draft = target_of(2, VOCABULARY), draft_of(3, VOCABULARY, VOCABULARY)
    weights = {len(path): draft((0,) * len(path)) for path in [(), (0,), (0, 0)]}

    def same(path: Path) -> DraftDistribution | None:
        return weights.get(len(path), weights[0])

    def target(path: Path) -> FloatArray:
        proposal = same(path)
        assert proposal is not None
        if len(path) not in equal_at:
            return other(path)
        p = np.zeros(VOCABULARY)
        p[list(proposal.token_ids)] = np.array(proposal.weights) / sum(proposal.weights)
        return p

    assert bias(block, target, same, 3) < 1e-12
    if len(equal_at) == 3:
        assert accepted(block, target, same, 3) == pytest.approx(3.0, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 3), support=st.integers(1, VOCABULARY), zeros=st.booleans())
def test_it_never_accepts_less_than_rejection(seed: int, length: int, support: int, zeros: bool) -> None:
    target, draft = target_of(seed, VOCABULARY, zeros), draft_of(seed + 1, VOCABULARY, support)
    gain = accepted(block, target, draft, length) - accepted(rejection, target, draft, length)
    assert gain > -1e-12
    if length == 1 or support == 1:
        assert gain == pytest.approx(0.0, abs=1e-12)


def test_it_accepts_more_than_rejection_by_what_the_paper_leads_one_to_expect() -> None:
    pairs = [(target_of(seed, VOCABULARY), draft_of(seed + 100, VOCABULARY, VOCABULARY)) for seed in range(20)]
    plain, whole = (sum(accepted(rule, *pair, 3) for pair in pairs) for rule in (rejection, block))
    assert 1.02 < whole / plain < 1.3


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_for_a_deterministic_draft_it_is_rejection(length: int, zeros: bool) -> None:
    target, draft = target_of(5, VOCABULARY, zeros), draft_of(0, VOCABULARY, 0)
    gain = accepted(block, target, draft, length) - accepted(rejection, target, draft, length)
    assert gain == pytest.approx(0.0, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 3), support=st.integers(0, VOCABULARY), zeros=st.booleans())
def test_a_replacement_is_never_what_it_replaces(seed: int, length: int, support: int, zeros: bool) -> None:
    """So a commit that ends a block early leaves the drafter's chain: what was looked at is not judged again."""
    target, draft = target_of(seed, VOCABULARY, zeros), draft_of(seed + 1, VOCABULARY, support)
    for selection, verdict, weight in rounds(block, target, draft, length, draft):
        if len(verdict.path) < length and weight > 0.0:
            assert verdict.next_token != selection.token_ids[len(verdict.path)]


def test_to_stop_at_the_first_failure_is_biased() -> None:
    target, draft = target_of(5, VOCABULARY), draft_of(6, VOCABULARY, 3)
    assert bias(block, target, draft, 2) < 1e-12
    assert bias(stops_at_first_failure, target, draft, 2) > 1e-3


def test_a_drafter_that_lies_about_q_changes_the_output() -> None:
    target, honest, lying = target_of(5, VOCABULARY), draft_of(6, VOCABULARY, 3), draft_of(7, VOCABULARY, 3)
    assert bias(block, target, honest, 2) < 1e-12
    assert bias(block, target, lying, 2, drawn=honest) > 1e-3


@pytest.mark.parametrize("honest", [0, 1, 2])
def test_a_token_outside_its_own_q_ends_the_chain_and_is_reported(honest: int) -> None:
    target, draft = target_of(8, VOCABULARY), draft_of(9, VOCABULARY, 2)

    def claimed(path: Path) -> DraftDistribution | None:
        return DraftDistribution((0, 1), (3, 4)) if len(path) == honest else draft(path)

    def really(path: Path) -> DraftDistribution | None:
        return DraftDistribution((2,), (1,)) if len(path) == honest else draft(path)

    found = list(rounds(block, target, claimed, honest + 1, really))
    assert all(verdict.dishonest and len(verdict.path) <= honest for _, verdict, _ in found)
    assert error(target, law_of(iter(found), target, honest + 1), honest + 1) < 1e-12


@pytest.mark.parametrize("after_token", [True, False])
def test_a_chain_may_stop_after_a_token_for_its_value_but_not_before_it(after_token: bool) -> None:
    target, draft = target_of(8, VOCABULARY), draft_of(9, VOCABULARY, 3)

    def found() -> Iterator[tuple[Selection, AcceptanceResult, float]]:
        for tokens, weight in chains(draft, 3, VOCABULARY):
            end = tokens.index(2) + after_token if 2 in tokens else 3
            selection = chain(tokens[:end], draft)
            for verdict, probability in outcomes(block, selection, target):
                yield selection, verdict, weight * probability

    wrong = error(target, law_of(found(), target, 4), 4)
    assert wrong < 1e-12 if after_token else wrong > 1e-3


def test_only_what_can_matter_is_asked_for() -> None:
    """The row after the last token only for a bonus; nothing below a token that p rules out."""
    sure, asked = np.array([0.0, 1.0, 0.0]), list[Path]()

    def target(path: Path) -> FloatArray:
        asked.append(path)
        return sure

    assert run(block, chain((1, 1), lambda path: None), Outcomes(()), target) == AcceptanceResult((0, 1), 1)
    assert asked == [(), (1,), (1, 1)]
    asked.clear()
    assert run(block, chain((2, 1), lambda path: None), Outcomes(()), target) == AcceptanceResult((), 1)
    assert asked == [()]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2**64 - 1), st.integers(1, 4))
def test_near_identical_single_precision_pairs_always_yield_a_possible_token(
    seed: int, noise_seed: int, length: int
) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.integers(1, 65536, VOCABULARY)
    p = (weights / weights.sum()).astype(np.float32).astype(np.float64)
    selection = chain(
        tuple(generator.integers(VOCABULARY, size=length).tolist()),
        lambda path: DraftDistribution(tuple(range(VOCABULARY)), tuple(weights.tolist())),
    )
    verdict = run(block, selection, RoundChance(noise_seed, 5), lambda path: p)
    assert 0 <= verdict.next_token < VOCABULARY
    assert len(verdict.path) == length  # p = q up to rounding: all passes
