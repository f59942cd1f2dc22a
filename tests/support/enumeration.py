"""Exact enumeration of an acceptance rule: every draft and every coin, weighted by its probability."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from functools import cache

import numpy as np

from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.noise import Purpose
from slipstream.speculation.selection import Selection
from verifier_svc.acceptance.result import AcceptanceResult, Distribution, FloatArray

Path = tuple[int, ...]
Target = Callable[[Path], FloatArray]
Draft = Callable[[Path], DraftDistribution | None]
Law = dict[Path, float]
ALWAYS_SAYS = 1
"""The token of a deterministic draft."""


class Outcomes:
    """A chance that takes every branch once: it replays `script`, and notes what else could have happened."""

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

    def accepts(self, depth: int, probability: float, sibling: int = 0) -> bool:
        assert 0.0 <= probability <= 1.0
        return bool(self.branch([1.0 - probability, probability]))

    def draw(self, depth: int, weights: FloatArray, purpose: Purpose) -> int:
        return self.branch(list(weights / weights.sum()))


AnyRule = Callable[..., Generator[Distribution, FloatArray, AcceptanceResult]]


def run(rule: AnyRule, selection: Selection, chance: object, target: Target) -> AcceptanceResult:
    """The rule's result; a request is answered with an array of its own, as by the judge."""
    walk = rule(selection, chance)
    request = next(walk)
    while True:
        try:
            request = walk.send(target(selection.path(request.node)).copy())
        except StopIteration as stop:
            outcome: AcceptanceResult = stop.value
            return outcome


def outcomes(rule: AnyRule, selection: Selection, target: Target) -> Iterator[tuple[AcceptanceResult, float]]:
    waiting: list[Path] = [()]
    while waiting:
        chance = Outcomes(waiting.pop())
        yield run(rule, selection, chance, target), chance.weight
        waiting += chance.alternatives


def tree(nodes: list[tuple[Path, DraftDistribution | None]]) -> Selection:
    """A selection of (tokens from the root down to the node, distribution of its token), parents first."""
    index = {path: number for number, (path, _) in enumerate(nodes)}
    assert len(index) == len(nodes)
    zeros = (0.0,) * len(nodes)
    return Selection(
        tuple(path[-1] for path, _ in nodes),
        tuple(index.get(path[:-1], -1) for path, _ in nodes),
        tuple(len(path) for path, _ in nodes),
        zeros,
        zeros,
        tuple(proposal for _, proposal in nodes),
    )


def chain(tokens: Path, draft: Draft) -> Selection:
    return tree([(tokens[: index + 1], draft(tokens[:index])) for index in range(len(tokens))])


def dense(proposal: DraftDistribution | None, vocabulary: int) -> FloatArray:
    """q over the vocabulary."""
    q = np.zeros(vocabulary)
    if proposal is None:
        q[ALWAYS_SAYS] = 1.0
    else:
        q[list(proposal.token_ids)] = np.array(proposal.weights) / sum(proposal.weights)
    return q


def chains(draft: Draft, length: int, vocabulary: int) -> Iterator[tuple[Path, float]]:
    """Every chain that may be drawn, with its probability."""
    for tokens in itertools.product(range(vocabulary), repeat=length):
        weight = math.prod(float(dense(draft(tokens[:i]), vocabulary)[token]) for i, token in enumerate(tokens))
        if weight > 0.0:
            yield tokens, weight


def law_of(found: Iterator[tuple[Selection, AcceptanceResult, float]], target: Target, length: int) -> Law:
    """Joint law of the first `length` tokens, where what a round leaves open is drawn from the target."""
    law: Law = defaultdict(float)
    for selection, outcome, weight in found:
        accepted = selection.path(outcome.path[-1]) if outcome.path else ()
        for path, rest in continuations((*accepted, outcome.next_token), length, target):
            law[path] += weight * rest
    return law


def continuations(start: Path, length: int, target: Target) -> Iterator[tuple[Path, float]]:
    for rest in itertools.product(range(len(target(()))), repeat=length - len(start)):
        path = start + rest
        yield path, math.prod(float(target(path[:i])[path[i]]) for i in range(len(start), length))


def error(target: Target, law: Law, length: int) -> float:
    expected = dict(continuations((), length, target))
    assert set(law) <= set(expected)
    return max(abs(law.get(path, 0.0) - expected[path]) for path in expected)


def target_of(seed: int, vocabulary: int, zeros: bool = False) -> Target:
    known: dict[Path, FloatArray] = {}

    def target(path: Path) -> FloatArray:
        if path not in known:
            p = np.random.default_rng([seed, *path, len(path)]).dirichlet(np.ones(vocabulary))
            if zeros:
                p[(seed + sum(path)) % vocabulary] = 0.0
            known[path] = p / p.sum()
        return known[path]

    return target


def draft_of(seed: int, vocabulary: int, support: int) -> Draft:
    """An honest sparse q of this many tokens at every path; 0: a deterministic draft."""

    @cache
    def draft(path: Path) -> DraftDistribution | None:
        if support == 0:
            return None
        generator = np.random.default_rng([seed, *path, len(path), 77])
        ids = generator.permutation(vocabulary)[:support]
        return DraftDistribution(tuple(ids.tolist()), tuple(generator.integers(1, 65536, support).tolist()))

    return draft


def rounds(
    rule: AnyRule, target: Target, draft: Draft, length: int, drawn: Draft
) -> Iterator[tuple[Selection, AcceptanceResult, float]]:
    """Every round there can be. `drawn` is what draft tokens are really drawn from, if the drafter lies."""
    for tokens, weight in chains(drawn, length, len(target(()))):
        selection = chain(tokens, draft)
        for outcome, probability in outcomes(rule, selection, target):
            yield selection, outcome, weight * probability


def bias(rule: AnyRule, target: Target, draft: Draft, length: int, drawn: Draft | None = None) -> float:
    return error(target, law_of(rounds(rule, target, draft, length, drawn or draft), target, length + 1), length + 1)


def accepted(rule: AnyRule, target: Target, draft: Draft, length: int) -> float:
    """Expected number of accepted tokens."""
    return sum(weight * len(outcome.path) for _, outcome, weight in rounds(rule, target, draft, length, draft))
