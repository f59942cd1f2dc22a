"""Turns a draft's log q into proposed nodes: the one place where noise, cuts, penalties and grammars meet a draft."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch

from slipstream.engine.devices import download, upload
from slipstream.engine.sampler import coupled_sampling, draft_draws, fused_ranking, logits_processor
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.errors import Internal, SlipstreamError
from slipstream.proposers.base import Proposal, ProposedNode, ProposerContext
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.tokenizer.grammar import Cursor, Grammar, Grammars, Mask, MaskBudget

MASKS_S = 0.001, 0.25
"""Seconds of the model's thread that the masks of one session may take, as `MaskBudget` counts. Once they are spent the
session is proposed for without its grammar."""


_TARGET_SIZE = attrgetter("context.vocabulary_size")


class NodeChooser:
    """Chooses up to `width` nodes below each place, by the rule of the place's session."""

    def __init__(
        self, width: int, proposal_tokens: int, sharpness: float = 1.0, grammars: Grammars | None = None
    ) -> None:
        self._width = width
        self._proposal_tokens = proposal_tokens
        self._sharpness = sharpness
        self._grammars = grammars
        self._grammar_of: dict[Hashable, Future[Grammar]] = {}
        self._cursors: dict[Hashable, Cursor] = {}

    def close_sequence(self, handle: Hashable) -> None:
        self._grammar_of.pop(handle, None)
        self._cursors.pop(handle, None)

    def choose(self, places: Sequence[Place], rows: torch.Tensor, answers: list[Proposal | SlipstreamError]) -> None:
        """Adds the nodes below every place from its log q, float32 [places, V], unprocessed: none where the request
        allows no token that q does."""
        sizes = tuple(map(_TARGET_SIZE, places))
        if min(sizes) < rows.shape[-1]:
            rows = within(rows, sizes)
        width = rows.shape[-1]
        sampled = [replace(place.sampled(width), mask=self.mask(place)) for place in places]
        processed = logits_processor.process(rows, sampled)
        for drawn in (False, True):
            chosen = [i for i, place in enumerate(places) if place.context.sampling.drawn == drawn]
            if not chosen:
                continue
            some = [places[i] for i in chosen]
            propose = self._drawn if drawn else self._ranked
            own = processed if len(some) == len(places) else processed[upload(torch.tensor(chosen), rows.device)]
            for i, place, nodes in zip(chosen, some, propose(some, own), strict=True):
                answer = answers[place.index]
                if not nodes and _is_broken(rows[i]):
                    answers[place.index] = broken_numbers()
                elif isinstance(answer, Proposal):
                    answer.nodes.extend(nodes[: place.context.max_nodes - len(answer.nodes)])

    def mask(self, place: Place) -> Mask | None:
        """Returns the tokens that the sequence's grammar allows there; None where it has none, or it is not compiled
        yet, or cannot be followed: the verifier drops what lies outside."""
        context, handle = place.context, place.context.handle
        if context.structured_output is None or self._grammars is None:
            return None
        if handle not in self._grammar_of:
            self._grammar_of[handle] = self._grammars.compile(
                context.structured_output, context.cache_salt, context.tenant
            )
        try:
            if handle not in self._cursors and self._grammar_of[handle].done():
                self._cursors[handle] = self._grammar_of[handle].result().cursor(MaskBudget(*MASKS_S))
            cursor = self._cursors.get(handle)
            return cursor.mask([*place.committed_output, *place.path]) if cursor is not None else None
        except SlipstreamError:
            return None

    def _ranked(self, places: list[Place], processed: torch.Tensor) -> list[list[ProposedNode]]:
        """For the coupled rule: the likeliest winners with the target's own noise on the drafter's q. The first is the
        best node, the others may replace it."""
        positions = [place.context.length + len(place.path) for place in places]
        tokens, confidences = download(*self.rank([place.context for place in places], positions, processed))
        rows = zip(places, tokens.tolist(), confidences.tolist(), strict=True)
        return [ranked_nodes(place.node, row, confidence) for place, row, confidence in rows]

    def rank(
        self, contexts: Sequence[ProposerContext], positions: list[int], processed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`coupled_sampling.rank` of rows of these sequences, which decide the tokens at these positions; on the
        device."""
        samplings = [context.sampling for context in contexts]
        greedy, seeds = [sampling.greedy for sampling in samplings], [sampling.seed for sampling in samplings]
        return coupled_sampling.rank(processed, greedy, seeds, positions, self._width, self._sharpness)

    def rank_raw(
        self,
        contexts: Sequence[ProposerContext],
        positions: list[int],
        rows: torch.Tensor,
        sampled: Sequence[logits_processor.SampledRow],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rank` of rows that are not processed yet: on GPUs by fused kernels, where these do what the rows ask for."""
        samplings = [row.sampling for row in sampled]
        if not fused_ranking.ranks(rows, samplings, self._width):
            return self.rank(contexts, positions, logits_processor.process(rows, sampled))
        adjusted = logits_processor.adjust(rows, sampled)
        return fused_ranking.rank(adjusted, samplings, positions, self._width, self._sharpness)

    def _drawn(self, places: list[Place], processed: torch.Tensor) -> list[list[ProposedNode]]:
        """For the rule `rejection`: tokens really drawn from the sparse q that is sent along, siblings without
        replacement."""
        ids, weights = draft_draws.quantise(processed, self._proposal_tokens)
        contexts = [place.context for place in places]
        one_hot = upload(torch.tensor([context.sampling.greedy for context in contexts]), ids.device)
        weights[:, 1:].masked_fill_(one_hot[:, None], 0)  # where p is one-hot: so be q
        streams = [context.noise_stream for context in contexts]
        nodes = [place.context.noise_nodes[place.number] for place in places]
        drawn = draft_draws.draw(ids, weights, streams, nodes, self._width)
        tokens, ids, weights = download(drawn, ids, weights)
        rows = zip(places, tokens.tolist(), draft_draws.pack(ids, weights), strict=True)
        return [[] if q is None else siblings(place.node, row, q) for place, row, q in rows]


@dataclass(slots=True)
class Place:
    """One node below which others are proposed."""

    index: int
    """Index of its context in the step."""
    context: ProposerContext
    number: int
    """Index in the context's `expand`."""
    path: list[int] = field(init=False)
    """Candidate tokens down to the node."""

    def __post_init__(self) -> None:
        self.path = self.context.path(self.node)

    @property
    def node(self) -> int:
        return self.context.expand[self.number]

    @property
    def committed_output(self) -> list[int]:
        return self.context.tokens[self.context.prompt_length : self.context.length]

    def sampled(self, width: int) -> logits_processor.SampledRow:
        """Returns the sampling state of its row of `width` logits; only penalties need the tokens before it. A target
        that is padded further than the draft model may have tokens beyond the row: nothing is to be done about them."""
        sampling = self.context.sampling.below(width)
        if not sampling.penalised:
            return logits_processor.SampledRow(sampling)
        history = TokenHistory(_below(width, self.context.tokens[: self.context.prompt_length]))
        history.append(_below(width, self.committed_output))
        return logits_processor.SampledRow(sampling, history, tuple(self.path))


def _is_broken(row: torch.Tensor) -> bool:
    """Whether a row without candidates has none because of its numbers, and not because of what the request forbids."""
    return not bool((row < math.inf).all())


def broken_numbers() -> Internal:
    return Internal("the draft model's logits are NaN or infinite for this session.", reason="BROKEN_NUMBERS")


def ranked_nodes(parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> list[ProposedNode]:
    """The nodes below `parent`, of one row of `NodeChooser.rank`."""
    return [ProposedNode(parent, token, sure) for token, sure in zip(tokens, confidences, strict=True) if token >= 0]


def within(rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """log q [R, V] over the ids that each row's target has: columns from the largest of `sizes` [R] on are cut, and in
    the rows of smaller targets the others are impossible. So what is drawn is drawn from a q that has no others."""
    width = min(rows.shape[-1], max(sizes))
    if width < rows.shape[-1]:
        rows = rows[:, :width].contiguous()
    if min(sizes) < width:
        rows = rows.clone()
        for row, size in enumerate(sizes):
            rows[row, size:] = -math.inf
    return rows


def _below(width: int, tokens: list[int]) -> list[int]:
    return tokens if max(tokens, default=0) < width else [token for token in tokens if token < width]


def siblings(parent: int, tokens: list[int], q: DraftDistribution) -> list[ProposedNode]:
    """The drawn tokens in the order of drawing, each with what it was drawn from: q without those before it.

    So whatever became of the first ones, the next one's law given them is the distribution sent along.
    """
    drawn = tokens[: len(q.token_ids)]
    share = dict(zip(q.token_ids, q.weights, strict=True))
    total = sum(q.weights)
    return [
        ProposedNode(parent, token, math.log(share[token] / total), q.without(drawn[:index]))
        for index, token in enumerate(drawn)
    ]
