"""Propose with a small language model: one packed forward pass for all sequences and each level of their trees.

A pass expands several nodes of each sequence's tree at once: the tree below the committed prefix is part of the call,
so no KV of a candidate outlives it, and a branch that dies costs nothing. A call may go several levels deep: a level of
a small model takes less time than handing it back, joining it to the tree and asking for the next one.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import replace

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.segment import Segment
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import ROOT, Proposal, ProposerContext, propose_each
from slipstream.proposers.draft_sequences import DraftSequences
from slipstream.proposers.node_choice import NodeChooser, Place
from slipstream.tokenizer.grammar import Grammars


class _Draft:
    """One sequence during a call. Nodes are numbered as in a proposal: the context's, then the proposed ones."""

    def __init__(self, index: int, context: ProposerContext, segment: Segment, proposal: Proposal) -> None:
        self.index = index
        """Index of its context in the call."""
        self.context = context
        """Context below which the present level proposes."""
        self.segment = segment
        """Segment that the present level computes."""
        self.proposal = proposal
        self.levels = 1
        """Levels so far."""
        deeper, nodes = context.deeper, len(context.node_tokens)
        self._tokens, self._parents = [*context.node_tokens], [*context.parents]
        self._log_probs = dict(zip(context.expand, deeper.path_log_probs, strict=True)) if deeper else {}
        """Log-probability of the path down to each node that is expanded or was proposed."""
        self._open: list[tuple[float, int]] = []
        """A heap of proposed nodes to expand: their paths' log-probability, negative, and number."""
        self._places = {node: node for node in (ROOT, *range(nodes))}
        """Where the segment has each computed node."""
        self._first = nodes
        """Number of the first proposed node."""

    def expand(self) -> list[int]:
        """The nodes of the next level, best first; none where that pays or is asked for no more."""
        deeper, proposed = self.context.deeper, self.proposal.nodes
        if deeper is None or self.levels > deeper.levels or len(proposed) >= self.context.max_nodes:
            return []
        for node in proposed[len(self._tokens) - self._first :]:
            path = self._log_probs[node.parent] + min(node.log_prob, 0.0)
            if path >= deeper.least_log_prob:
                heapq.heappush(self._open, (-path, len(self._tokens)))
            self._log_probs[len(self._tokens)] = path
            self._tokens.append(node.token)
            self._parents.append(node.parent)
        return [heapq.heappop(self._open)[1] for _ in range(min(deeper.expand, len(self._open)))]

    def descend(self, expand: list[int]) -> None:
        """Goes on to the next level, which computes these nodes: all above them are computed."""
        self.levels += 1
        self.context = replace(self.context, node_tokens=self._tokens, parents=self._parents, expand=expand)
        before = self.segment
        wanted = [*range(len(before.nodes), len(before.nodes) + len(expand))]
        nodes = before.nodes + [self._tokens[node] for node in expand]
        parents = before.parents + [self._places[self._parents[node]] for node in expand]
        self._places.update(zip(expand, wanted, strict=True))
        self.segment = Segment(before.sequence, before.pending, nodes, parents, wanted=wanted, held=before.tokens)


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
        begun: list[_Draft] = []
        answers = propose_each(contexts, lambda index, context: self._begin(index, context, begun))
        level = begun
        while level:
            self._propose_level(level, answers)
            going = [draft for draft in level if draft.context.deeper and isinstance(answers[draft.index], Proposal)]
            level = [draft for draft in going if self._descend(draft)]
        for draft in begun:
            answer = answers[draft.index]
            if draft.levels > 1 and isinstance(answer, Proposal):
                answers[draft.index] = replace(answer, levels=draft.levels)
            if len(draft.segment.pending) > 1 or not draft.segment.want_logits:  # else the next call computes it again
                self._engine.kv.keep(draft.segment, [])
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._sequences.close_sequence(handle)
        self._chooser.close_sequence(handle)

    def _begin(self, index: int, context: ProposerContext, begun: list[_Draft]) -> Proposal:
        """Appends what the first pass computes for the sequence to `begun`, if anything; returns the proposal to fill.

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
        pending, wanted = context.tokens[start:stop], context.expand if whole else []
        if max(pending) >= self._sequences.vocabulary_size:
            pending = self._sequences.readable(pending)
        segment = Segment(sequence, pending, nodes, parents, want_logits=whole, wanted=wanted)
        proposal = Proposal([], stop)
        begun.append(_Draft(index, context, segment, proposal))
        return proposal

    def _propose_level(self, drafts: list[_Draft], answers: list[Proposal | SlipstreamError]) -> None:
        """Proposes nodes below those that each draft expands, in one pass."""
        rows = self._engine.forward([draft.segment for draft in drafts]).logits
        places = [
            Place(draft.index, draft.context, number)
            for draft in drafts
            if draft.segment.want_logits
            for number in range(len(draft.context.expand))
        ]
        if places:
            self._chooser.choose(places, rows, answers)

    def _descend(self, draft: _Draft) -> bool:
        """Whether the draft has a next level, at which it then stands."""
        expand = draft.expand() if draft.segment.want_logits else []
        wanted = draft.segment.tokens + len(expand)
        # Without the room what was proposed is good all the same.
        if not expand or not self._sequences.grow(draft.segment.sequence, wanted, needed=False):
            return False
        draft.descend(expand)
        return True
