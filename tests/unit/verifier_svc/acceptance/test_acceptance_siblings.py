"""Recursive rejection over siblings: enumerated over every tree and every coin, what is emitted is p."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from slipstream.speculation.selection import Selection
from tests.support.enumeration import (
    AnyRule,
    Draft,
    Outcomes,
    Path,
    Target,
    chain,
    dense,
    draft_of,
    error,
    law_of,
    outcomes,
    run,
    target_of,
    tree,
)
from verifier_svc.acceptance.rejection import KeyedRandomness, probability, rejection, residual
from verifier_svc.acceptance.result import AcceptanceResult, Distribution, FloatArray

VOCABULARY = 3
Family = dict[int, DraftDistribution | None]  # the children of a node in the order drawn, each with what is sent along
Families = Callable[[Path], Iterator[tuple[Family, float]]]
Nodes = list[tuple[Path, DraftDistribution | None]]
Found = Iterator[tuple[Selection, AcceptanceResult, float]]


def without_replacement(draft: Draft, size: int) -> Families:
    """Up to `size` different tokens; each carries what it was drawn from, q without the tokens before it."""

    def families(path: Path, family: Family | None = None) -> Iterator[tuple[Family, float]]:
        family, q = family or {}, draft(path)
        assert q is not None
        left = {token: weight for token, weight in zip(q.token_ids, q.weights, strict=True) if token not in family}
        if not left or len(family) == size:
            yield family, 1.0
            return
        sent = DraftDistribution(tuple(left), tuple(left.values()))
        for token in left:
            for rest, weight in families(path, family | {token: sent}):
                yield rest, weight * probability(sent, token)

    return families


def merged(drafts: Sequence[Draft], vocabulary: int = VOCABULARY) -> Families:
    """An independent draw from each, by several drafters or by one with replacement; duplicates are one child."""

    def families(path: Path) -> Iterator[tuple[Family, float]]:
        proposals = [draft(path) for draft in drafts]
        for tokens in itertools.product(range(vocabulary), repeat=len(drafts)):
            weight, family = 1.0, Family()
            for token, proposal in zip(tokens, proposals, strict=True):
                weight *= float(dense(proposal, vocabulary)[token])
                family.setdefault(token, proposal)
            if weight > 0.0:
                yield family, weight

    return families


def trees(families: Families, depth: int, path: Path = ()) -> Iterator[tuple[Nodes, float]]:
    """Every tree down to `depth`, with its probability."""
    if depth == 0:
        yield [], 1.0
        return
    for family, weight in families(path):
        below = [list(trees(families, depth - 1, (*path, token))) for token in family]
        own: Nodes = [((*path, token), proposal) for token, proposal in family.items()]
        for subtrees in itertools.product(*below):
            nodes, total = list(own), weight
            for subtree, share in subtrees:
                nodes += subtree
                total *= share
            yield nodes, total


def rounds(rule: AnyRule, target: Target, families: Families, depth: int) -> Found:
    for nodes, weight in trees(families, depth):
        selection = tree(nodes)
        for verdict, share in outcomes(rule, selection, target):
            yield selection, verdict, weight * share


def bias(rule: AnyRule, target: Target, families: Families, depth: int) -> float:
    return error(target, law_of(rounds(rule, target, families, depth), target, depth + 1), depth + 1)


def accepted(rule: AnyRule, target: Target, families: Families, depth: int) -> float:
    return sum(weight * len(verdict.path) for _, verdict, weight in rounds(rule, target, families, depth))


def mutant(
    selection: Selection, chance: Outcomes, same_p: bool
) -> Generator[Distribution, FloatArray, AcceptanceResult]:
    """Every child against the same p; or else SpecInfer's rule, blind to duplicates that merged. Of the root only."""
    p = yield Distribution(-1)
    left = p
    for child in [index for index, parent in enumerate(selection.parents) if parent == -1]:
        token, proposal = selection.token_ids[child], selection.distributions[child]
        if chance.accepts(0, min(1.0, float((p if same_p else left)[token]) / probability(proposal, token))):
            after = yield Distribution(child)
            return AcceptanceResult((child,), chance.draw(1, after, Purpose.BONUS))
        left = residual(left, proposal, token)
        left = left / left.sum()
    return AcceptanceResult((), chance.draw(0, left, Purpose.RESIDUAL))


def leviathan(selection: Selection, chance: KeyedRandomness) -> Generator[Distribution, FloatArray, AcceptanceResult]:
    """The rule on a chain, as Leviathan et al. 2023 have it."""
    path = list[int]()
    while True:
        p = yield Distribution(path[-1] if path else -1)
        depth = len(path)
        if depth == len(selection):
            return AcceptanceResult(tuple(path), chance.draw(depth, p, Purpose.BONUS))
        token, proposal = selection.token_ids[depth], selection.distributions[depth]
        if not chance.accepts(depth, min(1.0, float(p[token]) / probability(proposal, token))):
            return AcceptanceResult(tuple(path), chance.draw(depth, residual(p, proposal, token), Purpose.RESIDUAL))
        path.append(depth)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(0, 3),
    depth=st.integers(1, 2),
    support=st.integers(1, VOCABULARY),
    zeros=st.booleans(),
)
def test_siblings_drawn_without_replacement_give_the_law_of_the_target(
    seed: int, size: int, depth: int, support: int, zeros: bool
) -> None:
    target, draft = target_of(seed, VOCABULARY, zeros), draft_of(seed + 1, VOCABULARY, support)
    assert bias(rejection, target, without_replacement(draft, size), depth) < 1e-12


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    supports=st.lists(st.integers(0, VOCABULARY), min_size=2, max_size=3),
    same=st.booleans(),
    zeros=st.booleans(),
)
def test_merged_independent_draws_keep_the_targets_distribution(
    seed: int, supports: list[int], same: bool, zeros: bool
) -> None:
    """With replacement from one q, or from several drafters' own, deterministic ones among them."""
    target, size = target_of(seed, VOCABULARY, zeros), len(supports)
    sources = [draft_of(seed + i, VOCABULARY, support) for i, support in enumerate(supports)]
    sources = sources[:1] * size if same else sources
    assert bias(rejection, target, merged(sources), 2 if size == 2 else 1) < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3])
def test_sparse_q_over_a_larger_vocabulary(size: int, seed: int) -> None:
    target, draft = target_of(seed, 6), draft_of(seed + 1, 6, 5)
    for families in (without_replacement(draft, size), merged([draft] * size, vocabulary=6)):
        assert bias(rejection, target, families, 1) < 1e-12


@pytest.mark.parametrize("order", list(itertools.permutations(range(VOCABULARY), 2)))
def test_deterministic_siblings_are_zeroed_out_and_accepted_with_their_own_probability(order: Path) -> None:
    target = target_of(6, VOCABULARY)

    def families(path: Path) -> Iterator[tuple[Family, float]]:
        yield dict.fromkeys(order), 1.0

    assert bias(rejection, target, families, 2) < 1e-12
    assert accepted(rejection, target, families, 1) == pytest.approx(target(())[list(order)].sum(), abs=1e-12)


def test_a_sampled_child_and_alternatives_chosen_after_it() -> None:
    """The drafter's most likely tokens besides the sampled one: deterministic given it."""
    target, draft = target_of(7, VOCABULARY), draft_of(8, VOCABULARY, VOCABULARY)

    def families(path: Path, sampled_first: bool = True) -> Iterator[tuple[Family, float]]:
        q = draft(path)
        for token in range(VOCABULARY):
            other = max({*range(VOCABULARY)} - {token}, key=lambda v: probability(q, v))
            pair: Family = {token: q, other: None} if sampled_first else {other: None, token: q}
            yield pair, probability(q, token)

    assert bias(rejection, target, families, 2) < 1e-12
    assert bias(rejection, target, lambda path: families(path, sampled_first=False), 1) > 1e-3  # not given x_1


@pytest.mark.parametrize("size", [1, 2])
def test_where_p_equals_q_the_first_child_is_accepted(size: int) -> None:
    draft = draft_of(9, VOCABULARY, VOCABULARY)
    families, target = without_replacement(draft, size), lambda path: dense(draft(path), VOCABULARY)
    assert bias(rejection, target, families, 2) < 1e-12
    assert accepted(rejection, target, families, 2) == pytest.approx(2.0)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), tokens=st.lists(st.integers(0, 2), max_size=3), noise_seed=st.integers(0, 2**64 - 1))
def test_a_chain_is_judged_by_leviathans_rule_coin_by_coin(seed: int, tokens: list[int], noise_seed: int) -> None:
    target, selection = target_of(seed, VOCABULARY), chain(tuple(tokens), draft_of(seed, VOCABULARY, VOCABULARY))
    verdicts = [run(rule, selection, KeyedRandomness(noise_seed, 4), target) for rule in (rejection, leviathan)]
    assert verdicts[0] == verdicts[1]


def test_another_sibling_never_lowers_acceptance() -> None:
    target, draft = target_of(10, VOCABULARY), draft_of(11, VOCABULARY, VOCABULARY)
    shares = [accepted(rejection, target, without_replacement(draft, size), 1) for size in (1, 2, 3)]
    assert shares[0] < shares[1] < shares[2] == pytest.approx(1.0)  # the whole vocabulary


@pytest.mark.parametrize("same_p", [True, False])
def test_independent_siblings_and_siblings_that_stay_in_q_are_biased(same_p: bool) -> None:
    target, draft = target_of(14, VOCABULARY), draft_of(65, VOCABULARY, VOCABULARY)
    families = merged([draft, draft])
    assert bias(rejection, target, families, 1) < 1e-12
    assert bias(functools.partial(mutant, same_p=same_p), target, families, 1) > 1e-3


@pytest.mark.parametrize("reduced", [True, False])
def test_a_lost_sibling_is_harmless_only_where_each_carries_its_reduced_distribution(reduced: bool) -> None:
    """Sent with the full q, a second sibling whose first never arrived would pass for a draw from all of it."""
    target, draft = target_of(12, VOCABULARY), draft_of(13, VOCABULARY, VOCABULARY)

    def families(path: Path) -> Iterator[tuple[Family, float]]:
        for family, weight in without_replacement(draft, 2)(path):
            second = list(family)[1]
            yield {second: family[second] if reduced else draft(path)}, weight

    found = bias(rejection, target, families, 1)
    assert found < 1e-12 if reduced else found > 1e-3


def test_a_drafter_with_a_false_q_changes_the_output() -> None:
    target, honest, lying = target_of(5, VOCABULARY), *(draft_of(seed, VOCABULARY, 3) for seed in (6, 7))

    def lies(path: Path) -> Iterator[tuple[Family, float]]:
        for family, weight in merged([honest, honest])(path):
            yield dict.fromkeys(family, lying(path)), weight

    assert bias(rejection, target, lies, 1) > 1e-3


@pytest.mark.parametrize("outside", [DraftDistribution((1, 2), (3, 4)), DraftDistribution((1,), (3,))])
def test_a_token_outside_its_own_q_is_reported_and_no_token_after_it_is_accepted(outside: DraftDistribution) -> None:
    """Of the second q nothing at all is left after its sibling."""
    target = target_of(8, VOCABULARY)
    selection = tree([((1,), None), ((0,), outside), ((2,), None)])
    law = np.zeros(VOCABULARY)
    for verdict, weight in outcomes(rejection, selection, target):
        assert verdict.path == (0,) or (verdict.path == () and verdict.dishonest)
        law[1 if verdict.path else verdict.next_token] += weight
    assert np.abs(law - target(())).max() < 1e-12


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2**64 - 1), st.permutations(range(VOCABULARY)))
def test_near_identical_single_precision_pairs_always_yield_a_possible_token(
    seed: int, noise_seed: int, tokens: list[int]
) -> None:
    weights = np.random.default_rng(seed).integers(1, 65536, VOCABULARY)
    p = (weights / weights.sum()).astype(np.float32).astype(np.float64)
    proposal = DraftDistribution(tuple(range(VOCABULARY)), tuple(weights.tolist()))
    selection = tree([((token,), proposal) for token in tokens])
    verdict = run(rejection, selection, KeyedRandomness(noise_seed, 5), lambda path: p)
    assert 0 <= verdict.next_token < VOCABULARY
