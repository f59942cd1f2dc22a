"""Propose with Medusa's heads: all depths at once from the hidden state that the last token was chosen from.

Under the coupled rule one call proposes a whole sparse tree (`medusa_tree`): each head's tokens are ranked with the
noise of their own position, and the tree is grown by how often each rank of each head was right before. Under
`rejection` tokens are drawn, one level for each call. A pass costs some small matrices and the heads' outputs, and
reads no text: nothing is prefilled, and no KV is kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.engine.sampler import coupled_sampling, logits_processor
from slipstream.errors import NotFound, SlipstreamError
from slipstream.proposers.base import (
    ROOT,
    HiddenNeed,
    OpenedProposer,
    Proposal,
    ProposedNode,
    ProposerContext,
    ProposerSettings,
    any_vocabulary,
)
from slipstream.proposers.medusa_heads import MedusaHeads, load_heads
from slipstream.proposers.medusa_tree import grow
from slipstream.proposers.node_choice import NodeChooser, Place
from slipstream.tokenizer.vocabulary import model_folder, read_json

log = logging.getLogger(__name__)

RANKS = 10
"""Tokens of each head that may become candidates."""
TREE = 32
"""Candidates that one call proposes; which of them pay, the verifier decides."""
PUBLISHED = ((0.56, 0.1), (0.32, 0.09), (0.2, 0.07), (0.15, 0.05), (0.12, 0.04))
"""Accuracy of rank 0 and of rank 1 of the five heads of the published 7 B model: what is expected of unknown heads."""
PRIOR = 64.0
"""Observations that the expected accuracy is worth."""
WINDOW = 4096.0
"""Observations after which one counts 1/e."""
FLOOR, FLOOR_AFTER = 0.1, 256
"""Share of the first head's tokens among its ranks, after so many, below which heads belong to another target."""


class RankAccuracy:
    """How often each rank of each head was the committed token, where the heads before it were right."""

    def __init__(self, expected: Sequence[Sequence[float]]) -> None:
        self._hits = [[PRIOR * each for each in ranks] for ranks in expected]
        self._seen = [PRIOR for _ in expected]

    def add(self, ranked: Sequence[Sequence[int]], committed: Sequence[int]) -> None:
        """`ranked`: tokens of each head, best first; `committed`: the tokens that came in their places."""
        keep = 1.0 - 1.0 / WINDOW
        for head, (tokens, token) in enumerate(zip(ranked, committed, strict=False)):
            self._seen[head] = self._seen[head] * keep + 1.0
            self._hits[head] = [
                hits * keep + (each == token) for hits, each in zip(self._hits[head], tokens, strict=True)
            ]
            if token not in tokens:
                break

    def table(self) -> list[list[float]]:
        """[heads][ranks], not rising with the rank."""
        shares = [[hits / seen for hits in ranks] for ranks, seen in zip(self._hits, self._seen, strict=True)]
        return [_falling(ranks) for ranks in shares]


def _falling(values: Sequence[float]) -> list[float]:
    lowest, falling = 1.0, []
    for value in values:
        lowest = min(lowest, value)
        falling.append(lowest)
    return falling


@dataclass(slots=True)
class _Sequence:
    """What is known of one sequence."""

    token: int = -1
    """The number of the token whose hidden state is the newest."""
    state: torch.Tensor | None = None
    """[hidden] that state."""
    logits: torch.Tensor | None = None
    """float32 [heads, vocabulary] from it, once they were needed."""
    ranked: list[list[int]] = field(default_factory=list)
    """[heads][RANKS] tokens of the last proposal, made after `ranked_length` committed tokens."""
    ranked_length: int = 0

    def read(self, context: ProposerContext) -> None:
        for rows in context.hidden:
            self.token, self.state, self.logits = rows.end - 1, rows.states.last[-1], None


class MedusaProposer:
    """Proposes for sequences whose newest hidden state is that of the token before the last."""

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        expected: Sequence[Sequence[float]],
        width: int = 4,
        proposal_tokens: int = 32,
        sharpness: float = 1.0,
    ) -> None:
        self._heads, self._sharpness = heads, sharpness
        self._chooser = NodeChooser(width, proposal_tokens, sharpness)
        self._sequences: dict[Hashable, _Sequence] = {}
        self.accuracy = {greedy: RankAccuracy(expected) for greedy in (True, False)}
        self._proposed = self._found = 0
        """Tokens that came where the first head had proposed, and those among its ranks."""

    @torch.inference_mode()
    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        answers: list[Proposal | SlipstreamError] = [Proposal([], context.length) for context in contexts]
        known = [self._sequences.setdefault(context.handle, _Sequence()) for context in contexts]
        for sequence, context in zip(known, contexts, strict=True):
            sequence.read(context)
            self._learn(sequence, context)
        ready = [
            index
            for index, (sequence, context) in enumerate(zip(known, contexts, strict=True))
            if sequence.state is not None and sequence.token == context.length - 2 and context.expand
        ]
        self._compute([known[index] for index in ready])
        places = list[Place]()
        rows = list[torch.Tensor]()
        for index in ready:
            context, logits = contexts[index], known[index].logits
            assert logits is not None
            if context.sampling.coupled:
                answers[index] = Proposal(self._tree(known[index], logits, context), context.length)
                continue
            for number, node in enumerate(context.expand):
                if (depth := len(context.path(node))) < len(self._heads):
                    places.append(Place(index, context, number))
                    rows.append(logits[depth])
        if places:
            self._chooser.choose(places, torch.stack(rows), answers)
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._sequences.pop(handle, None)
        self._chooser.close_sequence(handle)

    def _compute(self, sequences: list[_Sequence]) -> None:
        """One pass of all heads over the states that are new."""
        fresh = {id(each): each for each in sequences if each.logits is None}
        states = [each.state for each in fresh.values() if each.state is not None]
        if states:
            logits = self._heads.logits(torch.stack(states))
            for row, sequence in enumerate(fresh.values()):
                sequence.logits = logits[:, row]

    def _tree(self, sequence: _Sequence, logits: torch.Tensor, context: ProposerContext) -> list[ProposedNode]:
        depths = min(len(logits), context.max_length - context.length)
        if depths <= 0 or ROOT not in context.expand:
            return []
        place = Place(0, context, context.expand.index(ROOT))
        rows = [place.sampled] * depths  # what deeper candidates add to penalties differs from path to path
        processed = logits_processor.process(logits[:depths], rows)
        greedy, seeds = [context.sampling.greedy] * depths, [context.sampling.seed] * depths
        positions = [context.length + depth for depth in range(depths)]
        ids, sure = coupled_sampling.rank(processed, greedy, seeds, positions, RANKS, self._sharpness)
        tokens, claims = ids.tolist(), sure.exp().tolist()
        sequence.ranked, sequence.ranked_length = tokens, context.length
        measured = self.accuracy[context.sampling.greedy].table()
        table = [_falling(_blend(*each)) for each in zip(claims, measured[:depths], strict=True)]
        size = min(TREE, context.max_nodes)
        return _nodes(grow(table, size), table, tokens, len(context.node_tokens))

    def _learn(self, sequence: _Sequence, context: ProposerContext) -> None:
        """Compares the last proposal with what was committed in its place."""
        committed = context.tokens[sequence.ranked_length : context.length]
        if not sequence.ranked or not committed:
            return
        self.accuracy[context.sampling.greedy].add(sequence.ranked, committed)
        self._proposed += 1
        self._found += committed[0] in sequence.ranked[0]
        sequence.ranked = []
        if self._proposed == FLOOR_AFTER and self._found < FLOOR * FLOOR_AFTER:
            log.warning(
                "%d of %d tokens were among the first Medusa head's best %d; the heads seem to belong to another model",
                self._found, self._proposed, RANKS,
            )  # fmt: skip


def _blend(claims: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Geometric means of what a head claims of its ranks here and how often each was right before."""
    return [math.sqrt(claim * share) for claim, share in zip(claims, measured, strict=True)]


def _nodes(
    paths: list[tuple[tuple[int, ...], float]], table: list[list[float]], tokens: list[list[int]], first: int
) -> list[ProposedNode]:
    """`first`: the number of the first proposed node."""
    nodes: list[ProposedNode] = []
    number: dict[tuple[int, ...], int] = {(): ROOT}
    for path, _ in paths:
        depth, rank = len(path) - 1, path[-1]
        token = tokens[depth][rank]
        if token >= 0 and path[:-1] in number:
            number[path] = first + len(nodes)
            nodes.append(ProposedNode(number[path[:-1]], token, math.log(table[depth][rank])))
    return nodes


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `medusa` for `settings.target`. Raises what `load_heads` raises."""
    heads = load_heads(settings.model, settings.target)
    proposer = MedusaProposer(
        heads,
        expected=_expected(settings.model, len(heads)),
        width=settings.width,
        proposal_tokens=settings.proposal_tokens,
    )
    return OpenedProposer(any_vocabulary("medusa"), proposer, HiddenNeed(), len(heads))


def _expected(name: str, heads: int) -> list[list[float]]:
    """Accuracies that training measured (`medusa_rank_accuracy`), else those of published heads."""
    measured: object = None
    with contextlib.suppress(NotFound, OSError):  # heads may be a file alone
        measured = read_json(model_folder(name) / "config.json").get("medusa_rank_accuracy")
    if isinstance(measured, list) and len(measured) >= heads:
        return [_falling([float(each) for each in ranks[:RANKS]]) for ranks in measured[:heads]]
    shapes = [PUBLISHED[min(head, len(PUBLISHED) - 1)] for head in range(heads)]
    return [[best, *(second / rank for rank in range(1, RANKS))] for best, second in shapes]
