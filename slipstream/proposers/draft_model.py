"""Propose with a small language model: one packed forward pass for all sequences of a step.

A step expands several nodes of each sequence's tree at once: the tree below the committed prefix is part of the pass,
so no KV of a candidate outlives the step, and a branch that dies costs nothing. Trees are small (tens of nodes) and
passes of a small model are all overhead, so computing them again is cheaper than keeping their rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.segment import Segment
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import Proposal, ProposerContext
from slipstream.proposers.draft_sequences import DraftSequences
from slipstream.proposers.node_choice import NodeChooser, Place
from slipstream.tokenizer.grammar import Grammars


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
        self._chooser = NodeChooser(width, proposal_tokens, sharpness, grammars)

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
            self._chooser.choose(places, rows, answers)
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._sequences.close_sequence(handle)
        self._chooser.close_sequence(handle)

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
