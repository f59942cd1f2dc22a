"""Rejection sampling, by exact enumeration: every draft and every coin, weighted by its probability, must add up to
p.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from slipstream.noise import Purpose
from slipstream.proposal import Proposal
from slipstream.selection import Selection
from verifier_svc.acceptance.rejection import KeyedChance, rejection, residual
from verifier_svc.acceptance.verdict import FloatArray, Verdict

VOCABULARY = 3
Path = tuple[int, ...]
Target = Callable[[Path], FloatArray]
Draft = Callable[[Path], Proposal | None]


class Outcomes:
    """A `Chance` that takes every branch once: it replays `script`, and notes what else could have happened."""

    def __init__(self, script: Path) -> None:
        self.script, self.taken, self.weight = script, list[int](), 1.0
        self.alternatives: list[Path] = []

    def branch(self, probabilities: list[float]) -> int:
        step = len(self.taken)
        possible = [index for index, value in enumerate(probabilities) if value > 0.0]
        if step < len(self.script):
            choice = self.script[step]
        else:
            choice = possible[0]
            self.alternatives += [(*self.taken, other) for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= probabilities[choice]
        return choice

    def accepts(self, depth: int, probability: float) -> bool:
        return bool(self.branch([1.0 - probability, probability]))

    def draw(self, depth: int, weights: FloatArray, purpose: Purpose) -> int:
        return self.branch(list(weights / weights.sum()))


def run(selection: Selection, chance: Outcomes | KeyedChance, target: Target) -> Verdict:
    rule = rejection(selection, chance)
    request = next(rule)
    while True:
        try:
            request = rule.send(target(selection.path(request.node)))
        except StopIteration as stop:
            verdict: Verdict = stop.value
            return verdict


def outcomes(selection: Selection, target: Target) -> Iterator[tuple[Verdict, float]]:
    waiting: list[Path] = [()]
    while waiting:
        chance = Outcomes(waiting.pop())
        yield run(selection, chance, target), chance.weight
        waiting += chance.alternatives


def chain(tokens: Path, draft: Draft) -> Selection:
    size = len(tokens)
    proposals = tuple(draft(tokens[:index]) for index in range(size))
    zeros = (0.0,) * size
    return Selection(tokens, tuple(range(-1, size - 1)), tuple(range(1, size + 1)), zeros, zeros, proposals)


def dense(proposal: Proposal | None) -> FloatArray:
    """q over the vocabulary; a deterministic drafter always says 1."""
    q = np.zeros(VOCABULARY)
    if proposal is None:
        q[1] = 1.0
    else:
        q[list(proposal.token_ids)] = np.array(proposal.weights) / sum(proposal.weights)
    return q


def emitted(target: Target, draft: Draft, length: int, drawn: Draft | None = None) -> dict[Path, float]:
    """Joint law of the first length + 1 tokens, where what a round leaves open is drawn from the target.

    `drawn` is what draft tokens are really drawn from, if the drafter lies.
    """
    law: dict[Path, float] = defaultdict(float)
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        weight = math.prod(float(dense((drawn or draft)(tokens[:i]))[token]) for i, token in enumerate(tokens))
        if weight == 0.0:
            continue
        for verdict, probability in outcomes(chain(tokens, draft), target):
            start = (*tokens[: len(verdict.path)], verdict.next_token)
            for path, rest in continuations(start, length + 1, target):
                law[path] += weight * probability * rest
    return law


def continuations(start: Path, length: int, target: Target) -> Iterator[tuple[Path, float]]:
    for rest in itertools.product(range(VOCABULARY), repeat=length - len(start)):
        path = start + rest
        yield path, math.prod(float(target(path[:i])[path[i]]) for i in range(len(start), length))


def error(target: Target, law: dict[Path, float], length: int) -> float:
    expected = dict(continuations((), length + 1, target))
    return max(abs(law.get(path, 0.0) - expected[path]) for path in expected)


def target_of(seed: int, zeros: bool = False) -> Target:
    def target(path: Path) -> FloatArray:
        p = np.random.default_rng([seed, *path, len(path)]).dirichlet(np.ones(VOCABULARY))
        if zeros:
            p[(seed + sum(path)) % VOCABULARY] = 0.0
        normal: FloatArray = p / p.sum()
        return normal

    return target


def draft_of(seed: int, support: int = VOCABULARY) -> Draft:
    def draft(path: Path) -> Proposal | None:
        if support == 0:
            return None
        generator = np.random.default_rng([seed, *path, len(path), 77])
        ids = generator.permutation(VOCABULARY)[:support]
        return Proposal(tuple(ids.tolist()), tuple(generator.integers(1, 65536, support).tolist()))

    return draft


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(0, 3),
    support=st.integers(0, VOCABULARY),
    zeros=st.booleans(),
)
def test_the_joint_law_of_the_emitted_tokens_is_the_targets(seed: int, length: int, support: int, zeros: bool) -> None:
    target, draft = target_of(seed, zeros), draft_of(seed + 1, support)
    assert error(target, emitted(target, draft, length), length) < 1e-12


@pytest.mark.parametrize("support", [0, 1, 2, 3])
def test_acceptance_is_the_overlap_of_p_and_q(support: int) -> None:
    target, draft = target_of(3), draft_of(4, support)
    p, q = target(()), dense(draft(()))
    accepted = 0.0
    for token in range(VOCABULARY):
        if q[token]:
            found = outcomes(chain((token,), draft), target)
            accepted += q[token] * sum(weight for verdict, weight in found if verdict.path)
    assert accepted == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


def test_a_drafter_that_lies_about_q_changes_the_output() -> None:
    """So the tests above have teeth, and the rule is for trusted drafters only."""
    target, honest, lying = target_of(5), draft_of(6), draft_of(7)
    assert error(target, emitted(target, honest, 2), 2) < 1e-12
    assert error(target, emitted(target, lying, 2, drawn=honest), 2) > 1e-3


def test_a_token_outside_its_own_q_is_reported_and_replaced_by_a_draw_from_p() -> None:
    target = target_of(8)
    selection = chain((2,), lambda path: Proposal((0, 1), (3, 4)))
    law = np.zeros(VOCABULARY)
    for verdict, weight in outcomes(selection, target):
        assert verdict.dishonest and verdict.path == ()
        law[verdict.next_token] += weight
    assert np.abs(law - target(())).max() < 1e-12


def test_only_first_children_are_judged() -> None:
    proposal = Proposal((0, 1, 2), (1, 1, 1))
    selection = Selection((0, 1), (-1, -1), (1, 1), (0.0, 0.0), (0.0, 0.0), (proposal, proposal))
    one_hot = np.array([0.0, 1.0, 0.0])
    for verdict, _ in outcomes(selection, lambda path: one_hot):
        assert verdict.path == () and verdict.next_token == 1


@pytest.mark.parametrize("proposal", [Proposal((0, 1, 2), (1, 1, 2)), None])
def test_nothing_left_of_p_falls_back_to_p(proposal: Proposal | None) -> None:
    p = np.array([0.25, 0.25, 0.5]) if proposal else np.array([0.0, 1.0, 0.0])
    assert residual(p, proposal, 1).tolist() == p.tolist()


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2**64 - 1))
def test_near_identical_single_precision_pairs_always_yield_a_possible_token(seed: int, noise_seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.integers(1, 65536, VOCABULARY)
    p = (weights / weights.sum()).astype(np.float32).astype(np.float64)
    token = int(generator.integers(VOCABULARY))
    selection = chain((token,), lambda path: Proposal(tuple(range(VOCABULARY)), tuple(weights.tolist())))
    verdict = run(selection, KeyedChance(noise_seed, 5), lambda path: p)
    assert 0 <= verdict.next_token < VOCABULARY


def test_keyed_randomness_reproduces_the_law_and_itself() -> None:
    target, size = target_of(9), 20_000
    proposal = Proposal((0, 1, 2), (5, 1, 1))
    q, p = dense(proposal), target(())
    drafts = np.random.default_rng(1).choice(VOCABULARY, size, p=q)
    observed = np.zeros(VOCABULARY)
    for position, token in enumerate(drafts.tolist()):
        verdict = run(chain((token,), lambda path: proposal), KeyedChance(11, position), target)
        observed[token if verdict.path else verdict.next_token] += 1
    assert stats.chisquare(observed, p * size).pvalue > 1e-4
    first, second = (run(chain((0,), lambda path: proposal), KeyedChance(11, 3), target) for _ in range(2))
    assert first == second
