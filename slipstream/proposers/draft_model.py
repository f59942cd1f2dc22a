"""Propose with a small language model: one packed forward pass for all sequences of a step.

A step expands several nodes of each sequence's tree at once: the tree below the committed prefix is part of the pass,
so no KV of a candidate outlives the step, and a branch that dies costs nothing. Trees are small (tens of nodes) and
passes of a small model are all overhead, so computing them again is cheaper than keeping their rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.sampler import coupled_sampling, draft_distribution, logits_processor
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.engine.segment import Segment
from slipstream.errors import Internal, SlipstreamError
from slipstream.proposers.base import Proposal, ProposedNode, ProposerContext
from slipstream.proposers.draft_sequences import DraftSequences
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.tokenizer.grammar import Cursor, Grammar, Grammars, Mask, MaskBudget

MASKS_S = 0.001, 0.25
"""What the masks of one session may take of the model's thread, as `MaskBudget` counts. Once that is spent the session
is proposed for without its grammar."""


class ModelProposer:
    """Proposes up to `width` nodes below each expanded node; `proposal_tokens` bounds the support of the distributions
    that are sent along. With `grammars` a structured output is proposed inside its grammar."""

    def __init__(
        self,
        engine: Engine,
        *,
        width: int,
        proposal_tokens: int,
        sharpness: float = 1.0,
        grammars: Grammars | None = None,
    ) -> None:
        self._engine = engine
        self._sequences = DraftSequences(engine)
        self._width = width
        self._proposal_tokens = proposal_tokens
        self._sharpness = sharpness
        self._grammars = grammars
        self._grammar_of: dict[Hashable, Future[Grammar]] = {}
        self._cursors: dict[Hashable, Cursor] = {}

    @torch.inference_mode()
    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        self._sequences.begin_step()
        answers: list[Proposal | SlipstreamError] = []
        parts: list[Any] = []
        for index, context in enumerate(contexts):
            try:
                answers.append(self._prepare(index, context, parts))
            except SlipstreamError as error:
                answers.append(error)
        places, rows = self._compute(parts) if parts else ([], None)
        if rows is not None and places:
            self._choose(places, rows, answers)
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._sequences.close_sequence(handle)
        self._grammar_of.pop(handle, None)
        self._cursors.pop(handle, None)

    def _prepare(self, index: int, context: ProposerContext, parts: list[Any]) -> Proposal:
        """Appends what the step computes for the sequence to `parts`, if anything; returns the proposal to fill.

        Raises ResourceExhausted for a sequence that the KV cache could never hold.
        """
        sequence = self._sequences.hold(context.handle, context.tokens, context.length, context.cache_salt)
        start, end = sequence.length, context.length if context.expand else context.length - 1
        stop = min(end, start + context.max_read_tokens)
        if start == stop:
            return Proposal([], start)
        whole = stop == context.length
        nodes, parents = (context.node_tokens, context.parents) if whole else ([], [])
        if not self._sequences.grow(sequence, stop - start + len(nodes)):
            return Proposal([], start, no_room=True)
        segment = Segment(sequence, context.tokens[start:stop], nodes, parents, want_logits=whole)
        parts.append((index, context, segment))
        return Proposal([], stop)

    def _compute(self, parts: list[Any]) -> tuple[list[Place], torch.Tensor | None]:
        """The places to propose below, and their log q, float32 [places, V], unprocessed; None where there is none."""
        output = self._engine.forward([segment for _, _, segment in parts]).logits
        places: list[Place] = []
        rows: list[int] = []
        row = 0
        for index, context, segment in parts:
            if segment.want_logits:
                places += [Place(index, context, number) for number in range(len(context.expand))]
                rows += [row + 1 + node for node in context.expand]
            row += segment.logit_rows
            if len(segment.pending) > 1 or not segment.want_logits:  # else the next step computes that token again
                self._engine.keep(segment, [])
        return places, output[rows] if rows else None

    def _choose(self, places: list[Place], rows: torch.Tensor, answers: list[Proposal | SlipstreamError]) -> None:
        """Adds the nodes below every place from its log q, float32 [places, V], unprocessed."""
        processed = logits_processor.process(rows, [replace(place.sampled, mask=self._mask(place)) for place in places])
        for coupled in (True, False):
            chosen = [i for i, place in enumerate(places) if place.context.sampling.coupled == coupled]
            if not chosen:
                continue
            some = [places[i] for i in chosen]
            propose = self._ranked if coupled else self._drawn
            for place, nodes in zip(some, propose(some, processed[chosen]), strict=True):
                answer = answers[place.index]
                if not nodes:
                    error = "the draft model's numbers are broken for this session."
                    answers[place.index] = Internal(error, reason="BROKEN_NUMBERS")
                elif isinstance(answer, Proposal):
                    answer.nodes.extend(nodes[: place.context.max_nodes - len(answer.nodes)])

    def _mask(self, place: Place) -> Mask | None:
        """What the sequence's grammar allows there; None where it has none, or it is not compiled yet, or cannot be
        followed: the verifier drops what lies outside."""
        context, handle = place.context, place.context.handle
        if context.structured_output is None or self._grammars is None:
            return None
        if handle not in self._grammar_of:
            self._grammar_of[handle] = self._grammars.compile(context.structured_output, context.cache_salt)
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
        samplings = [place.context.sampling for place in places]
        greedy, seeds = [sampling.greedy for sampling in samplings], [sampling.seed for sampling in samplings]
        positions = [place.context.length + len(place.path) for place in places]
        tokens, confidences = coupled_sampling.rank(processed, greedy, seeds, positions, self._width, self._sharpness)
        rows = zip(places, tokens.tolist(), confidences.tolist(), strict=True)
        return [
            [ProposedNode(place.node, token, sure) for token, sure in zip(row, confidence, strict=True) if token >= 0]
            for place, row, confidence in rows
        ]

    def _drawn(self, places: list[Place], processed: torch.Tensor) -> list[list[ProposedNode]]:
        """For the rule `rejection`: tokens really drawn from the sparse q that is sent along, siblings without
        replacement."""
        ids, weights = draft_distribution.quantise(processed, self._proposal_tokens)
        contexts = [place.context for place in places]
        weights[[context.sampling.greedy for context in contexts], 1:] = 0  # p is one-hot: so be q
        streams = [context.noise_stream for context in contexts]
        nodes = [place.context.noise_nodes[place.number] for place in places]
        tokens = draft_distribution.draw(ids, weights, streams, nodes, self._width).tolist()
        rows = zip(places, tokens, draft_distribution.pack(ids, weights), strict=True)
        return [[] if q is None else siblings(place.node, drawn, q) for place, drawn, q in rows]


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

    @property
    def sampled(self) -> logits_processor.SampledRow:
        """What the row of logits stands for; only penalties need the tokens before it."""
        sampling = self.context.sampling
        if not sampling.penalised:
            return logits_processor.SampledRow(sampling)
        history = TokenHistory(self.context.tokens[: self.context.prompt_length])
        history.append(self.committed_output)
        return logits_processor.SampledRow(sampling, history, tuple(self.path))


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
