"""Which candidates are verified, and how far they get: the real candidate tree, walked along the target's own text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulation_texts import Key, Text
from benchmarks.simulation_trees import Grown
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import TreeLimits
from slipstream.speculation.selection import Selection
from verifier_svc.acceptance.coupled import coupled
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.estimators.calibration import Calibration

MOST = 32
"""Nodes of the largest choice; smaller ones are its head."""
STARTS = 4
"""The walk of a text is begun at each of its first few tokens: other rounds, the same text, less noise."""
_ROOM = TreeLimits(nodes=1 << 20, frame_nodes=1 << 20)
_PRIORS = [math.log(share) for share in (0.60, 0.14, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)]

Scoring = Callable[[Grown], Grown]
"""Gives a drafter's nodes other confidences, or leaves nodes out."""
Kept = Callable[[Grown, int, float], bool]
"""(tree, index of the node, its path probability) -> whether the drafter may add it."""
Chooser = Callable[[Text, int], Selection]
"""(text, number of the position) -> the `MOST` best candidates there, best first."""


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of some drafters at every position of every text."""

    trees: Mapping[str, Mapping[Key, Sequence[Grown]]]
    """By drafter, by text."""

    def tree(self, text: Text, position: int, drafters: Sequence[str], scoring: Scoring) -> CandidateTree:
        """Candidates that a verifier with these drafters would hold. Sources are the drafters' numbers."""
        base = text.rounds.start + position
        tree = CandidateTree(text.tokens[base - 1 : base], _ROOM)
        for source, drafter in enumerate(drafters):
            tree.graft(scoring(self.trees[drafter][text.key][position]).frame(tree.base_length, source))
        return tree

    def chooser(self, drafters: Sequence[str], scoring: Scoring) -> Chooser:
        """The system's own choice."""
        return lambda text, position: self.tree(text, position, drafters, scoring).select_likeliest(MOST)


def claimed(tree: Grown) -> Grown:
    """The drafter is believed."""
    return tree


def ranked(tree: Grown) -> Grown:
    """Every first guess is worth the same, every second one too, whatever its reported probability."""
    last = len(_PRIORS) - 1
    return replace(tree, log_probs=tuple(_PRIORS[min(rank, last)] for rank in tree.ranks))


def sharpened(power: float) -> Scoring:
    """Confidences to this power, and again a distribution over the siblings that were guessed."""

    def scoring(tree: Grown) -> Grown:
        sums: dict[int, float] = {}
        for parent, log_prob in zip(tree.parents, tree.log_probs, strict=True):
            sums[parent] = sums.get(parent, 0.0) + math.exp(power * log_prob)
        pairs = zip(tree.parents, tree.log_probs, strict=True)
        return replace(tree, log_probs=tuple(min(0.0, power * log_prob - math.log(sums[at])) for at, log_prob in pairs))

    return scoring


def kept(allowed: Kept) -> Scoring:
    """Leaves out the nodes that are not allowed, and what hangs on them."""

    def scoring(tree: Grown) -> Grown:
        numbers, paths, chosen = {0: 0}, {0: 0.0}, []
        for index, (parent, log_prob) in enumerate(zip(tree.parents, tree.log_probs, strict=True)):
            if parent in numbers and allowed(tree, index, math.exp(paths[parent] + log_prob)):
                chosen.append(index)
                numbers[index + 1] = len(chosen)
                paths[index + 1] = paths[parent] + log_prob
        return Grown(
            tuple(tree.token_ids[index] for index in chosen),
            tuple(numbers[tree.parents[index]] for index in chosen),
            tuple(tree.log_probs[index] for index in chosen),
            tuple(tree.ranks[index] for index in chosen),
            tuple(tree.passes[index] for index in chosen),
        )

    return scoring


def calibrated(forest: Forest, drafters: Sequence[str], texts: Sequence[Text], merged: bool, taught: int) -> Chooser:
    """Chooses by path probabilities corrected as the verifier corrects them: by what became of the likeliest `taught`
    candidates of every round of the other half of the texts, at this temperature. `merged`: nodes are separated by the
    set of drafters that sent them."""

    def names(chosen: Selection) -> list[str]:
        return ["+".join(sorted({drafters[s] for s in sent})) if merged else "all" for sent in chosen.sources]

    halves = [Calibration(lambda: 0.0), Calibration(lambda: 0.0)]
    plain = forest.chooser(drafters, claimed)
    for text in texts:
        position = 0
        while position < len(text.rounds):
            chosen = plain(text, position).head(taught)
            path = accepted(text, position, chosen)
            halves[text.prompt % 2].learn(names(chosen), "", chosen, path)
            position += len(path) + 1

    def choose(text: Text, position: int) -> Selection:
        tree = forest.tree(text, position, drafters, claimed)
        whole = tree.select_likeliest(4 * MOST)
        paths = halves[1 - text.prompt % 2].path_probabilities(names(whole), "", whole)
        return whole.likeliest(paths, MOST)[0]

    return choose


def accepted(text: Text, position: int, chosen: Selection) -> tuple[int, ...]:
    """The accepted path, by the system's own rule; the target's answers are read from its text."""
    base = text.rounds.start + position
    rule = coupled(chosen)
    request = next(rule)
    while True:
        try:
            request = rule.send(text.tokens[base + chosen.depth(request.node)])
        except StopIteration as stop:
            outcome: AcceptanceResult = stop.value
            return outcome.path


@dataclass(frozen=True, slots=True)
class Yield:
    """Tokens of each target pass."""

    mean: float
    """All tokens over all passes."""
    lowest: float
    """Lowest mean of one text."""
    highest: float
    """Highest mean of one text."""


def tokens_per_pass(texts: Sequence[Text], choose: Chooser, sizes: Sequence[int]) -> list[Yield]:
    """Walks every text with so many candidates in every round."""
    depths = [_depths(text, choose, sizes) for text in texts]
    yields: list[Yield] = []
    for column in range(len(sizes)):
        counts = [_walk([row[column] for row in text]) for text in depths]
        each = [tokens / passes for tokens, passes in counts]
        mean = sum(tokens for tokens, _ in counts) / sum(passes for _, passes in counts)
        yields.append(Yield(mean, min(each), max(each)))
    return yields


def _depths(text: Text, choose: Chooser, sizes: Sequence[int]) -> list[list[int]]:
    """Number of candidates that would be accepted, for each position and size."""
    depths: list[list[int]] = []
    for position in range(len(text.rounds)):
        path = accepted(text, position, choose(text, position))
        depths.append([sum(node < size for node in path) for size in sizes])
    return depths


def _walk(depths: Sequence[int]) -> tuple[int, int]:
    """(tokens, passes) over all starts."""
    tokens = passes = 0
    for start in range(min(STARTS, len(depths))):
        position = start
        while position < len(depths):
            tokens, passes = tokens + depths[position] + 1, passes + 1
            position += depths[position] + 1
    return tokens, passes
