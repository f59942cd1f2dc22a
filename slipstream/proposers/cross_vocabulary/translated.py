"""Propose with a small language model that has another tokenizer than the target.

The model reads the target's text in its own tokens (`translation`), its distribution over the next strings becomes
log q over the target's tokens (`continuations`), and `NodeChooser` chooses from that.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from slipstream.engine.engine import Engine
from slipstream.engine.segment import KVSequence, Segment
from slipstream.errors import ResourceExhausted, SlipstreamError
from slipstream.proposers.base import Proposal, ProposerContext, propose_each
from slipstream.proposers.cross_vocabulary.continuations import Continuations, Ending, Logs
from slipstream.proposers.cross_vocabulary.translation import DraftText, Translation
from slipstream.proposers.draft_sequences import DraftSequences
from slipstream.proposers.lookup import ContextReader
from slipstream.proposers.node_choice import NodeChooser, Place
from slipstream.tokenizer.vocabulary import common_prefix

HEALED = 2
"""Last draft tokens before a proposed token that may be spelled otherwise."""
LOOKAHEAD = 1
"""More passes for strings that are only the beginning of a target token."""


@dataclass(slots=True)
class Pass:
    """One sequence of a step in draft tokens: a tree below the last of `pending`, which may grow from pass to pass."""

    sequence: KVSequence
    start: int
    """Draft tokens before the pending ones."""
    pending: list[int]
    places: list[Place] = field(default_factory=list)
    continuations: list[Continuations] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    broken: bool = False
    _rows: dict[tuple[int, int], int] = field(default_factory=dict)
    _grown: list[list[int]] = field(default_factory=list)

    def walk(self, tokens: list[int], row: int = 0) -> list[int]:
        """The rows from `row` on along a path below it, which is added where it is missing. The root's row is 0."""
        rows = [row]
        for token in tokens:
            step = rows[-1], token
            if step not in self._rows:
                self.nodes.append(token)
                self.parents.append(rows[-1] - 1)
                self._rows[step] = len(self.nodes)
            rows.append(self._rows[step])
        return rows

    def segment(self) -> Segment:
        return Segment(self.sequence, self.pending, self.nodes, self.parents, want_logits=bool(self.places))

    def read(self, logs: Logs) -> None:
        """Takes the forward pass's log q [rows, draft tokens]."""
        self.broken = self.broken or bool(np.isnan(logs).any())
        for number, continuations in enumerate(self.continuations):
            if self._grown:
                continuations.grow(logs, self._grown[number])
            else:
                continuations.begin(logs)

    def extend(self) -> bool:
        """Adds what should be drafted on for another pass. False where there is nothing."""
        self._grown = [
            [self.walk([string.token], string.row)[-1] for string in continuations.unfinished()]
            for continuations in self.continuations
        ]
        self.start += len(self.pending) - 1
        self.pending = self.pending[-1:]
        return any(self._grown)


class TranslatedProposer:
    """A draft model for contexts in the target's tokens; the engine's model has the draft vocabulary. A call goes one
    level deep: a target token takes several passes as it is."""

    def __init__(
        self, engine: Engine, translation: Translation, *, width: int, proposal_tokens: int, sharpness: float = 1.0
    ) -> None:
        self._engine = engine
        self._sequences = DraftSequences(engine)
        self._chooser = NodeChooser(width, proposal_tokens, sharpness)
        self._translation = translation
        self._readers: dict[Hashable, ContextReader[DraftText]] = {}

    @torch.inference_mode()
    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        self._sequences.begin_step()
        parts: list[Pass] = []
        answers = propose_each(contexts, lambda index, context: self._prepare(index, context, parts))
        places, rows = self._compute(parts)
        if rows is not None:
            self._chooser.choose(places, rows, answers)
        return answers

    def close_sequence(self, handle: Hashable) -> None:
        self._sequences.close_sequence(handle)
        self._chooser.close_sequence(handle)
        self._readers.pop(handle, None)

    def _prepare(self, index: int, context: ProposerContext, parts: list[Pass]) -> Proposal:
        """Raises ResourceExhausted for a text that is longer than the draft model's or the cache's."""
        reader = self._readers.setdefault(context.handle, ContextReader(DraftText(self._translation)))
        text = reader.read_context(context)
        closed, ids = len(text.closed), text.ids
        expand = context.expand if len(text) == context.length else []
        paths = [context.path(node) for node in expand]
        tails = [text.tail(path) for path in paths]
        lengths = [min(common_prefix(ids[closed:], tail), len(tail) - HEALED) + closed for tail in tails]
        base = max(1, min([len(ids) - HEALED, *lengths]))
        if not ids:
            return Proposal([], len(text))
        longest = self._engine.model.max_length
        if base > longest:
            raise ResourceExhausted(f"the draft model holds {longest} tokens; decode without it.")
        sequence = self._sequences.hold(context.handle, ids, base, context.cache_salt)
        if sequence.length == base - 1 and not tails:
            return Proposal([], len(text))
        one = Pass(sequence, sequence.length, ids[sequence.length : base])
        for number, (path, tail) in enumerate(zip(paths, tails, strict=True)):
            if not closed and tail[:1] != ids[:1]:
                continue  # so short a text that not even its first token stays
            below = ids[base:closed] + tail[max(0, base - closed) :]
            rows = one.walk(below)
            last = min(HEALED, len(below))
            ending = Ending(tuple(below[len(below) - last :]), tuple(rows[len(below) - last :]))
            one.places.append(Place(index, context, number))
            one.continuations.append(Continuations(self._translation, text.spelled(path), ending))
        if not self._make_room(one):
            return Proposal([], min(len(text), context.length - 1), no_room=True)
        parts.append(one)
        return Proposal([], len(text))

    def _compute(self, parts: list[Pass]) -> tuple[list[Place], torch.Tensor | None]:
        unfinished = parts
        for _ in range(1 + LOOKAHEAD):
            if unfinished:
                self._forward(unfinished)
                unfinished = [one for one in unfinished if self._extend(one)]
        places: list[Place] = []
        rows: list[npt.NDArray[np.float32]] = []
        for one in parts:
            for place, continuations in zip(one.places, one.continuations, strict=True):
                row = continuations.log_q()
                if one.broken:
                    row.fill(np.nan)
                if one.broken or np.isfinite(row).any():  # else no target token spells what it would propose
                    places.append(place)
                    rows.append(row)
        return places, torch.from_numpy(np.stack(rows)) if rows else None

    def _make_room(self, one: Pass) -> bool:
        self._sequences.roll_back(one.sequence, one.start)
        return self._sequences.grow(one.sequence, len(one.pending) + len(one.nodes))

    def _extend(self, one: Pass) -> bool:
        """Adds the strings to draft on; False where there are none, or no room for them."""
        try:
            return one.extend() and self._make_room(one)
        except ResourceExhausted:
            return False

    def _forward(self, passes: list[Pass]) -> None:
        segments = [one.segment() for one in passes]
        output = self._engine.forward(segments).logits
        row = 0
        for one, segment in zip(passes, segments, strict=True):
            self._engine.kv.keep(segment, [])
            one.read(output[row : row + segment.logit_rows].log_softmax(dim=-1).cpu().numpy())
            row += segment.logit_rows
