"""Propose with a draft model on an engine of chains (vLLM): from the likeliest open node of each sequence several
levels down, without reading a token back between two of them. Siblings come from each level's likeliest tokens.

What a chain computed stays where it is: whatever of it is committed, or expanded later, is not computed again. Another
branch writes over it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.engine.devices import take_rows
from slipstream.engine.engine import ChainEngine
from slipstream.engine.sampler import logits_processor
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.proposers.base import Proposal, ProposerContext, propose_each
from slipstream.proposers.draft_sequences import DraftSequences
from slipstream.proposers.node_choice import NodeChooser, Place, broken_numbers, ranked_nodes, within
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.vocabulary import common_prefix

_Table = tuple[list[list[int]], list[list[float]]]
"""Tokens and confidences [rows, width] of one level."""


@dataclass(slots=True)
class _Chain:
    """One sequence during a call."""

    index: int
    """Index of its context in the call."""
    context: ProposerContext
    segment: Segment
    """Committed tokens to read, then the path down to the node that is expanded."""
    levels: int
    """Levels of nodes that are proposed; 0 while a prompt is only being read."""
    place: Place | None
    """The node that is expanded."""
    on_host: bool
    """Whether what may follow is decided with the tokens before it, so that one level needs the tokens of the one
    above."""
    rows: list[tuple[int, int]] = field(default_factory=list)
    """For each level, the number of its table among those of the call, and its row there."""

    @property
    def tokens(self) -> list[int]:
        return [*self.segment.pending, *self.segment.nodes]


class ChainProposer:
    """Proposes a chain of nodes below one expanded node for each sequence, and up to `width` siblings at each level;
    otherwise as `slipstream.proposers.draft_model.ModelProposer`. Deeper levels are computed whatever their
    probability: it is on the device. A session under penalties or a grammar goes one level deep in a call."""

    def __init__(
        self,
        engine: ChainEngine,
        *,
        width: int,
        proposal_tokens: int,
        sharpness: float = 1.0,
        grammars: Grammars | None = None,
    ) -> None:
        self._engine = engine
        self._sequences = DraftSequences(engine)
        self._chooser = NodeChooser(width, proposal_tokens, sharpness, grammars)
        self._ahead: dict[Hashable, list[int]] = {}
        """The tokens behind each sequence's length whose rows the last pass wrote: `KVSequence.ahead` of them."""

    @torch.inference_mode()
    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        self._sequences.begin_step()
        begun: list[_Chain] = []
        answers = propose_each(contexts, lambda index, context: self._begin(index, context, begun))
        ranked: list[tuple[Tensor, Tensor]] = []
        read: list[tuple[list[_Chain], Tensor]] = []
        for chains in self._passes(begun):
            self._compute(chains, ranked, read)
        found = self._engine.fetch(*(each for pair in ranked for each in pair)) if ranked else ()
        tables = [(tokens.tolist(), sure.tolist()) for tokens, sure in zip(found[::2], found[1::2], strict=True)]
        for chain in begun:
            self._finish(chain, tables, answers)
        for chains, rows in read:
            places = [chain.place for chain in chains if chain.place is not None]
            self._chooser.choose(places, rows, answers)
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._sequences.close_sequence(handle)
        self._chooser.close_sequence(handle)
        self._ahead.pop(handle, None)

    def _begin(self, index: int, context: ProposerContext, begun: list[_Chain]) -> Proposal:
        """Appends what is computed for the sequence to `begun`, if anything; returns the proposal to fill.

        Raises ResourceExhausted for a sequence that the KV cache could never hold.
        """
        if len(context.expand) > 1:
            raise InvalidArgument("a chain is proposed below one node; set DRAFTER_EXPAND to 1.")
        sequence = self._sequences.hold(context.handle, context.tokens, context.length, context.cache_salt)
        start, end = sequence.length, context.length if context.expand else context.length - 1
        stop = min(end, start + context.max_read_tokens, start + self._engine.max_pending)
        if start == stop:
            return Proposal([], start)
        place = Place(index, context, 0) if stop == context.length else None
        pending = self._sequences.readable(context.tokens[start:stop])
        path = [] if place is None else self._sequences.readable(place.path)
        sampling = context.sampling
        on_host = sampling.drawn or sampling.penalised or context.structured_output is not None
        levels = 0 if place is None else 1 if on_host or context.deeper is None else 1 + context.deeper.levels
        size = len(pending) + len(path)
        if levels > 1 and not self._sequences.grow(sequence, size + levels - 1, needed=False):
            levels = 1
        if not self._sequences.grow(sequence, size):
            return Proposal([], start, no_room=True)
        known = self._ahead.get(context.handle, [])[: sequence.ahead]
        held = min(common_prefix(known, [*pending, *path]), size - 1)
        parents = list(range(-1, len(path) - 1))
        segment = Segment(sequence, pending, path, parents, bool(levels), [len(path) - 1] if levels else [], held)
        begun.append(_Chain(index, context, segment, levels, place, on_host))
        return Proposal([], stop, levels=max(1, levels))

    def _passes(self, begun: list[_Chain]) -> Iterator[list[_Chain]]:
        """Parts of the step that fit into one pass each: mostly one."""
        chains: list[_Chain] = []
        tokens = 0
        for each in begun:
            more = each.segment.computed
            if chains and (len(chains) == self._engine.max_sequences or tokens + more > self._engine.max_tokens):
                yield chains
                chains, tokens = [], 0
            chains.append(each)
            tokens += more
        if chains:
            yield chains

    def _compute(
        self, chains: list[_Chain], ranked: list[tuple[Tensor, Tensor]], read: list[tuple[list[_Chain], Tensor]]
    ) -> None:
        """Enqueues the levels of these chains. What is decided on the device is added to `ranked`, level by level, and
        the logits of the others to `read`."""
        rows = self._engine.forward([chain.segment for chain in chains]).logits
        proposing = [chain for chain in chains if chain.levels]
        level = [chain for chain in proposing if not chain.on_host]
        others = [number for number, chain in enumerate(proposing) if chain.on_host]
        if others:
            read.append(([proposing[number] for number in others], take_rows(rows, others)))
        rows = take_rows(rows, [number for number, chain in enumerate(proposing) if not chain.on_host])
        while level:
            tokens, confidences = self._rank(level, rows)
            for row, chain in enumerate(level):
                chain.rows.append((len(ranked), row))
            ranked.append((tokens, confidences))
            going = [number for number, chain in enumerate(level) if len(chain.rows) < chain.levels]
            if not going:
                break
            best = take_rows(tokens[:, 0], going).clamp(min=0)  # in a broken row it is none
            level = [level[number] for number in going]
            rows = self._engine.extend([chain.segment.sequence for chain in level], best)

    def _rank(self, level: list[_Chain], rows: Tensor) -> tuple[Tensor, Tensor]:
        contexts = [chain.context for chain in level]
        rows = within(rows, [context.vocabulary_size for context in contexts])
        width = rows.shape[-1]
        sampled = [logits_processor.SampledRow(context.sampling.below(width)) for context in contexts]
        depths = [len(chain.segment.nodes) + len(chain.rows) for chain in level]
        positions = [context.length + depth for context, depth in zip(contexts, depths, strict=True)]
        return self._chooser.rank_raw(contexts, positions, rows, sampled)

    def _finish(self, chain: _Chain, tables: list[_Table], answers: list[Proposal | SlipstreamError]) -> None:
        """Keeps the KV of what is committed, notes what stands behind it, and adds the nodes to the answer."""
        decided = [(tables[level][0][row], tables[level][1][row]) for level, row in chain.rows]
        fed = [max(0, tokens[0]) for tokens, _ in decided[:-1]]
        self._keep(chain, fed)
        answer = answers[chain.index]
        if not isinstance(answer, Proposal) or chain.place is None:
            return
        parent, first, most = chain.place.node, len(chain.context.node_tokens), chain.context.max_nodes
        for tokens, confidences in decided:
            nodes = ranked_nodes(parent, tokens, confidences)
            if not nodes:
                if not chain.context.sampling.allowed_token_ids:  # else they may all be tokens that the head lacks
                    answers[chain.index] = broken_numbers()
                return
            parent = first + len(answer.nodes)
            answer.nodes.extend(nodes[: most - len(answer.nodes)])
            if len(answer.nodes) >= most:
                return

    def _keep(self, chain: _Chain, fed: list[int]) -> None:
        segment, sequence = chain.segment, chain.segment.sequence
        written = [*chain.tokens, *fed]
        kept = min(len(segment.pending), chain.context.length - 1 - sequence.length)
        if kept:
            nodes = written[kept:]
            whole = Segment(sequence, written[:kept], nodes, list(range(-1, len(nodes) - 1)))
            self._engine.kv.keep(whole, [])
        self._ahead[chain.context.handle] = written[kept:]
        sequence.ahead = len(written) - kept
