"""A method that proposes all depths at once, each depth by itself: Medusa's heads.

Under the coupled rule one call proposes a whole sparse tree: each depth's tokens are ranked with the noise of their own
position, and the tree is grown by how often each rank of each depth was right before. Every parent of one depth has the
same ranked children, so a path is a tuple of ranks, one for each depth, and its probability the product of theirs.
Under `rejection` tokens are drawn, one level for each call.
"""

from __future__ import annotations

import heapq
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.engine.sampler import coupled_sampling, logits_processor
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import ROOT, Proposal, ProposedNode, ProposerContext
from slipstream.proposers.node_choice import NodeChooser, Place, within

log = logging.getLogger(__name__)

RANKS = 10
"""Tokens of each depth that may become candidates."""
TREE = 32
"""Candidates that one call proposes; which of them pay, the verifier decides."""
PRIOR = 64.0
"""Observations that the expected accuracy is worth."""
WINDOW = 4096.0
"""Observations after which one counts 1/e."""
FLOOR, FLOOR_AFTER = 0.1, 256
"""Share of the first depth's tokens among its ranks, after so many, below which heads belong to another target."""

RankPath = tuple[int, ...]


def grow(probability: Sequence[Sequence[float]], size: int) -> list[tuple[RankPath, float]]:
    """The `size` likeliest paths with their probabilities, best first and parents before children.

    `probability[depth][rank]` is that of one rank given the parent, not rising with the rank. Best first is
    optimal: a path is never likelier than its parent or its better sibling (Chen et al. 2024, arXiv 2402.12374, for
    independent depths).
    """
    chosen: list[tuple[RankPath, float]] = []
    frontier: list[tuple[float, RankPath]] = [(-probability[0][0], (0,))] if size > 0 and probability else []
    while frontier and len(chosen) < size:
        negative, path = heapq.heappop(frontier)
        if not negative:
            break
        chosen.append((path, -negative))
        depth, rank = len(path) - 1, path[-1]
        ranks = probability[depth]
        if rank + 1 < len(ranks):
            heapq.heappush(frontier, (negative / ranks[rank] * ranks[rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(probability):
            heapq.heappush(frontier, (negative * probability[depth + 1][0], (*path, 0)))
    return chosen


class RankAccuracy:
    """Rates at which each rank of each depth was the committed token, where the depths before it were right."""

    def __init__(self, expected: Sequence[Sequence[float]]) -> None:
        self._hits = [[PRIOR * each for each in ranks] for ranks in expected]
        self._seen = [PRIOR for _ in expected]

    def add(self, ranked: Sequence[Sequence[int]], committed: Sequence[int]) -> None:
        """`ranked`: tokens of each depth, best first; `committed`: the tokens that came in their places."""
        keep = 1.0 - 1.0 / WINDOW
        for head, (tokens, token) in enumerate(zip(ranked, committed, strict=False)):
            self._seen[head] = self._seen[head] * keep + 1.0
            self._hits[head] = [
                hits * keep + (each == token) for hits, each in zip(self._hits[head], tokens, strict=True)
            ]
            if token not in tokens:
                break

    def table(self) -> list[list[float]]:
        """[depths][ranks], not rising with the rank."""
        shares = [[hits / seen for hits in ranks] for ranks, seen in zip(self._hits, self._seen, strict=True)]
        return [falling(ranks) for ranks in shares]


def expected_ranks(best: float, second: float) -> list[float]:
    """[RANKS] accuracies of one depth by those of rank 0 and rank 1: further ones fall as 1 / rank."""
    return [best, *(second / rank for rank in range(1, RANKS))]


def falling(values: Sequence[float]) -> list[float]:
    lowest, found = 1.0, []
    for value in values:
        lowest = min(lowest, value)
        found.append(lowest)
    return found


@dataclass(slots=True)
class _Drafted:
    """Latest draft of one sequence."""

    length: int
    """Committed tokens then."""
    logits: Tensor
    """float32 [depths, vocabulary]."""
    ranked: list[list[int]] = field(default_factory=list)
    """[depths][RANKS] tokens of the proposal."""


class ParallelProposer(ABC):
    """Proposes from one distribution for each depth, of which a subclass computes all for one root at once."""

    def __init__(self, expected: Sequence[Sequence[float]], *, width: int = 4, proposal_tokens: int = 32) -> None:
        """`expected`: [depths][ranks], what the accuracies are believed to be before they are measured."""
        self._chooser = NodeChooser(width, proposal_tokens)
        self._drafted: dict[Hashable, _Drafted] = {}
        self.accuracy = {greedy: RankAccuracy(expected) for greedy in (True, False)}
        self._proposed = self._found = 0
        """Tokens that came where the first depth had proposed, and those among its ranks."""

    @abstractmethod
    def _read(self, contexts: list[ProposerContext]) -> list[tuple[Proposal, bool]]:
        """Takes in what is new of each context. Returns an empty proposal for each, and whether its root can be drafted
        from."""

    @abstractmethod
    def _compute(self, contexts: list[ProposerContext]) -> list[Tensor]:
        """float32 [depths, vocabulary] below the root of each."""

    @torch.inference_mode()
    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        read = self._read(contexts)
        answers: list[Proposal | SlipstreamError] = [proposal for proposal, _ in read]
        for context in contexts:
            self._learn(context)
        ready = [index for index, (_, may) in enumerate(read) if may and contexts[index].expand]
        fresh = [contexts[index] for index in ready if not self._knows(contexts[index])]
        for context, logits in zip(fresh, self._compute(fresh) if fresh else [], strict=True):
            self._drafted[context.handle] = _Drafted(context.length, logits)
        places = list[Place]()
        rows = list[Tensor]()
        for index in ready:
            context, drafted = contexts[index], self._drafted[contexts[index].handle]
            if not context.sampling.drawn:
                answers[index] = Proposal(self._tree(drafted, context), context.length)
                continue
            for number, node in enumerate(context.expand):
                if (depth := len(context.path(node))) < len(drafted.logits):
                    places.append(Place(index, context, number))
                    rows.append(drafted.logits[depth])
        if places:
            self._chooser.choose(places, torch.stack(rows), answers)
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._drafted.pop(handle, None)
        self._chooser.close_sequence(handle)

    def _knows(self, context: ProposerContext) -> bool:
        drafted = self._drafted.get(context.handle)
        return drafted is not None and drafted.length == context.length

    def _tree(self, drafted: _Drafted, context: ProposerContext) -> list[ProposedNode]:
        depths = min(len(drafted.logits), context.max_length - context.length)
        if depths <= 0 or ROOT not in context.expand:
            return []
        place = Place(0, context, context.expand.index(ROOT))
        logits = within(drafted.logits[:depths], [context.vocabulary_size] * depths)
        rows = [place.sampled(logits.shape[-1])] * depths  # deeper candidates' part in penalties differs by path
        processed = logits_processor.process(logits, rows)
        greedy, seeds = [context.sampling.greedy] * depths, [context.sampling.seed] * depths
        positions = [context.length + depth for depth in range(depths)]
        ids, sure = coupled_sampling.rank(processed, greedy, seeds, positions, RANKS)
        tokens, claims = ids.tolist(), sure.exp().tolist()
        drafted.ranked = tokens
        measured = self.accuracy[context.sampling.greedy].table()
        table = [falling(_blend(*each)) for each in zip(claims, measured[:depths], strict=True)]
        size = min(TREE, context.max_nodes)
        return _nodes(grow(table, size), table, tokens, len(context.node_tokens))

    def _learn(self, context: ProposerContext) -> None:
        """Compares the last proposal with what was committed in its place."""
        drafted = self._drafted.get(context.handle)
        if drafted is None or not drafted.ranked or context.length <= drafted.length:
            return
        committed = context.tokens[drafted.length : context.length]
        self.accuracy[context.sampling.greedy].add(drafted.ranked, committed)
        self._proposed += 1
        self._found += committed[0] in drafted.ranked[0]
        drafted.ranked = []
        if self._proposed == FLOOR_AFTER and self._found < FLOOR * FLOOR_AFTER:
            log.warning(
                "%d of %d tokens were among the best %d of the first depth; the heads seem to be another model's",
                self._found, self._proposed, RANKS,
            )  # fmt: skip


def _blend(claims: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Geometric means of what a depth claims of its ranks here and how often each was right before."""
    return [math.sqrt(claim * share) for claim, share in zip(claims, measured, strict=True)]


def _nodes(
    paths: list[tuple[RankPath, float]], table: list[list[float]], tokens: list[list[int]], first: int
) -> list[ProposedNode]:
    """`first`: the number of the first proposed node."""
    nodes: list[ProposedNode] = []
    number: dict[RankPath, int] = {(): ROOT}
    for path, _ in paths:
        depth, rank = len(path) - 1, path[-1]
        token = tokens[depth][rank]
        if token >= 0 and path[:-1] in number:
            number[path] = first + len(nodes)
            nodes.append(ProposedNode(number[path[:-1]], token, math.log(table[depth][rank])))
    return nodes
