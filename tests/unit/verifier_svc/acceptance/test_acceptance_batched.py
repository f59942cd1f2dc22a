"""The rule `rejection` over many chains at once decides what the rule decides on each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.speculation.draft_distribution import DraftDistribution
from tests.support.enumeration import chain, run
from verifier_svc.acceptance.batched_rejection import NO_DRAFT, Chains, Drawn, Judged, leading, reject
from verifier_svc.acceptance.rejection import KeyedRandomness, rejection
from verifier_svc.acceptance.result import AcceptanceResult, FloatArray

VOCABULARY = 24
Case = tuple[FloatArray, list[int], list[DraftDistribution | None], int, int]
"""p of each row, candidates, their distributions, seed, position."""


def random_case(chance: np.random.Generator) -> Case:
    """p as after a cut, greedy, or near q, which is now and then missing, or not that of its token."""
    size = int(chance.integers(0, 6))
    p = chance.dirichlet(np.full(VOCABULARY, 0.3), size + 1)
    p[chance.random(p.shape) < 0.3] = 0.0
    p[:, 0] += 1e-6
    if chance.random() < 0.2:
        p = np.eye(VOCABULARY)[p.argmax(-1)]
    p /= p.sum(-1, keepdims=True)
    drafts, given = list[int](), list[DraftDistribution | None]()
    for row in p[:-1]:
        q = np.ceil(1000 * (row if chance.random() < 0.7 else chance.dirichlet(np.full(VOCABULARY, 0.3)))).astype(int)
        support = np.flatnonzero(q)
        drafts.append(int(chance.choice(support, p=q[support] / q.sum())))
        if chance.random() < 0.1:  # no draw of its own
            support = support[support != drafts[-1]]
        deterministic = chance.random() < 0.3 or not len(support)
        given.append(None if deterministic else DraftDistribution(tuple(support.tolist()), tuple(q[support].tolist())))
    return p, drafts, given, int(chance.integers(0, 2**64, dtype=np.uint64)), int(chance.integers(0, 10_000))


def by_the_rule(case: Case) -> AcceptanceResult:
    p, drafts, given, seed, position = case
    selection = chain(tuple(drafts), lambda path: given[len(path)])
    return run(rejection, selection, KeyedRandomness(seed, position), lambda path: p[len(path)].copy())


def at_once(cases: list[Case]) -> tuple[Judged, list[int]]:
    """What is judged, and how many candidates of each chain are accepted."""
    counts = np.array([len(drafts) for _, drafts, *_ in cases])
    starts = np.cumsum(counts + 1) - counts - 1
    pairs = [
        (start + depth, *pair)
        for start, (_, _, given, *_) in zip(starts, cases, strict=True)
        for depth, each in enumerate(given)
        if each is not None
        for pair in zip(each.token_ids, each.weights, strict=True)
    ]
    chains = Chains(
        counts,
        torch.tensor([token for _, drafts, *_ in cases for token in (*drafts, NO_DRAFT)]),
        np.repeat(np.array([seed for *_, seed, _ in cases], np.uint64), counts + 1),
        np.concatenate([position + np.arange(len(drafts) + 1) for _, drafts, _, _, position in cases]),
    )
    drawn = Drawn(*np.array(pairs, np.int64).reshape(-1, 3).T.copy())
    judged = reject(torch.from_numpy(np.concatenate([p for p, *_ in cases])), chains, drawn)
    return judged, leading(judged.accepted, counts).tolist()


def assert_equal(cases: list[Case]) -> list[AcceptanceResult]:
    results = [by_the_rule(case) for case in cases]
    judged, accepted = at_once(cases)
    assert accepted == [len(result.path) for result in results]
    assert judged.next_tokens.tolist() == [result.next_token for result in results]
    assert judged.dishonest.tolist() == [result.dishonest for result in results]
    return results


@pytest.mark.parametrize("seed", range(10))
def test_many_chains_are_judged_as_if_each_were_alone(seed: int) -> None:
    chance = np.random.default_rng(seed)
    cases = [random_case(chance) for _ in range(150)]
    results = assert_equal(cases)
    ends = [len(drafts) - len(result.path) for (_, drafts, *_), result in zip(cases, results, strict=True)]
    assert 0 in ends and max(ends) > 2
    assert {result.dishonest for result in results} == {True, False}
    assert {len(result.path) for result in results} >= {0, 1, 2, 3}


def test_a_batch_may_hold_one_chain_or_no_candidate() -> None:
    chance = np.random.default_rng(5)
    for _ in range(40):
        assert_equal([random_case(chance)])
    p, _, _, seed, position = random_case(chance)
    assert_equal([(p[:1], [], [], seed + number, position) for number in range(50)])


def test_where_a_rejection_leaves_nothing_the_target_s_own_distribution_stays() -> None:
    """p below q everywhere, which only rounding does: here by a half, so that it happens often."""
    share = np.array([5, 3, 2], dtype=float)
    p = np.zeros((2, VOCABULARY))
    p[:, :3] = share / 20.0
    q = DraftDistribution((0, 1, 2), (5, 3, 2))
    results = assert_equal([(p, [1], [q], seed, 7) for seed in range(400)])
    rejected = [result.next_token for result in results if not result.path]
    assert 150 < len(rejected) < 250
    assert np.bincount(rejected) / len(rejected) == pytest.approx(share / 10, abs=0.12)


def test_broken_rows_are_never_accepted_and_harm_no_other_chain() -> None:
    chance = np.random.default_rng(8)
    cases = [random_case(chance) for _ in range(30)]
    broken = next(index for index, (_, drafts, *_) in enumerate(cases) if len(drafts) > 2)
    clean, accepted = at_once(cases)
    cases[broken][0][0] = np.nan
    judged, now = at_once(cases)
    assert now[broken] == 0
    others = [index for index in range(30) if index != broken]
    assert [now[index] for index in others] == [accepted[index] for index in others]
    assert judged.next_tokens[others].tolist() == clean.next_tokens[others].tolist()
    assert 0 <= int(judged.next_tokens[broken]) < VOCABULARY
