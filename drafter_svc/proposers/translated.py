"""Guess with a small language model that has another tokenizer than the target.

The model reads the target's text in its own tokens (`translation`), what it says of the next strings becomes log q over
the target's tokens (`continuations`), and from there on a guess is a guess: processed, ranked with the target's noise,
or drawn, as `ModelProposer` does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from drafter_svc.proposers import Answer, DraftRequest
from drafter_svc.proposers.continuations import BRANCHES, Continuations, Ending, Logs
from drafter_svc.proposers.model import ModelProposer, Place
from drafter_svc.proposers.translation import DraftText, Translation
from drafter_svc.session import DraftSession
from slipstream.engine.engine import Engine
from slipstream.engine.kvcache.sequence import Sequence
from slipstream.engine.segment import Segment
from slipstream.errors import ResourceExhausted, SlipstreamError
from slipstream.tokenizer.vocabulary import common_prefix

HEALED = 2
"""Last draft tokens of a place that may turn out to be spelled otherwise."""
LOOKAHEAD = 1
"""More passes for strings that are only the beginning of a target token."""
SPARE = 1.25
"""KV is reserved for so many times the draft tokens that the session's text so far lets expect."""


@dataclass(slots=True)
class Mirror:
    """A session as the drafter holds it."""

    text: DraftText
    kept: list[int] = field(default_factory=list)
    """Draft tokens that have KV."""


@dataclass(slots=True)
class Pass:
    """One turn in draft tokens: a tree below the last of `pending`, which may grow from pass to pass."""

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

    def segment(self, sequence: Sequence) -> Segment:
        return Segment(sequence, self.pending, self.nodes, self.parents, want_logits=bool(self.places))

    def read(self, logs: Logs) -> None:
        """What the forward pass said: log q [rows, draft tokens]."""
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


class TranslatedProposer(ModelProposer):
    """As ModelProposer, on turns in the target's tokens; the engine's model has the translation's draft vocabulary."""

    def __init__(
        self,
        engine: Engine,
        translation: Translation,
        *,
        width: int,
        max_nodes: int,
        proposal_tokens: int,
        sharpness: float = 1.0,
    ) -> None:
        super().__init__(engine, width=width, max_nodes=max_nodes, proposal_tokens=proposal_tokens, sharpness=sharpness)
        self._translation = translation
        self._mirrors: dict[DraftSession, Mirror] = {}

    @torch.inference_mode()
    def grow(self, turns: list[DraftRequest]) -> list[Answer]:
        answers: list[Answer] = [[] for _ in turns]
        passes: dict[int, Pass] = {}
        for index, turn in enumerate(turns):
            try:
                if (one := self._pass(index, turn)) is not None:
                    passes[index] = one
            except SlipstreamError as error:
                answers[index] = error
        left = passes
        for _ in range(1 + LOOKAHEAD):
            if left:
                self._forward(turns, left)
                left = {index: one for index, one in left.items() if one.extend()}
        self._answer(list(passes.values()), answers)
        return answers

    def close(self, session: DraftSession) -> None:
        super().close(session)
        self._mirrors.pop(session, None)

    def _pass(self, index: int, turn: DraftRequest) -> Pass | None:
        """None where there is nothing to compute. Raises ResourceExhausted when there is no room."""
        mirror = self._mirrors.setdefault(turn.session, Mirror(DraftText(self._translation)))
        text = mirror.text
        text.read(turn.computed, turn.pending)
        ids, closed = text.ids, len(text.closed)
        nodes = [(node, begin, turn.path(node)) for node, begin in zip(turn.expand, turn.starts, strict=True)]
        tails = [text.tail(path) for _, _, path in nodes]
        lengths = [min(common_prefix(ids[closed:], tail), len(tail) - HEALED) + closed for tail in tails]
        base = max(1, min([len(ids) - HEALED, *lengths]))
        same = common_prefix(mirror.kept, ids)
        if not ids or (same >= base and not tails):
            return None
        start = min(same, base - 1)
        one = Pass(start, ids[start:base])
        for (node, begin, path), tail in zip(nodes, tails, strict=True):
            if not closed and tail[:1] != ids[:1]:
                continue  # so short a text that not even its first token stays
            below = ids[base:closed] + tail[max(0, base - closed) :]
            rows = one.walk(below)
            last = min(HEALED, len(below))
            ending = Ending(tuple(below[len(below) - last :]), tuple(rows[len(below) - last :]))
            one.places.append(Place(index, turn, node, begin, 0))
            one.continuations.append(Continuations(self._translation, text.spelled(path), ending))
        self._reserve(turn, mirror, one)
        return one

    def _reserve(self, turn: DraftRequest, mirror: Mirror, one: Pass) -> None:
        """Room for the pass. How many draft tokens a session will come to is a guess; where it was wrong, the KV is
        computed anew."""
        session, longest = turn.session, self._engine.model.max_length
        length = one.start + len(one.pending)
        needed = length + len(one.nodes) + LOOKAHEAD * BRANCHES * len(one.places)
        if length > longest:
            raise ResourceExhausted(f"the draft model holds {longest} tokens; decode without it.")
        if session.sequence is None or session.sequence.capacity < needed:
            super().close(session)
            expected = math.ceil(SPARE * length / len(mirror.text) * session.max_length) + self._max_nodes
            session.sequence = self._engine.open(max(needed, min(expected, longest)))
            one.pending = mirror.text.ids[:length]
            one.start = 0
        mirror.kept = mirror.text.ids[:length]

    def _forward(self, turns: list[DraftRequest], passes: dict[int, Pass]) -> None:
        segments: list[Segment] = []
        for index, one in passes.items():
            sequence = turns[index].session.sequence
            assert sequence is not None
            self._engine.rollback(sequence, one.start)
            segments.append(one.segment(sequence))
        output = self._engine.forward(segments).logits
        row = 0
        for one, segment in zip(passes.values(), segments, strict=True):
            self._engine.keep(segment, [])
            one.read(output[row : row + segment.logit_rows].log_softmax(dim=-1).cpu().numpy())
            row += segment.logit_rows

    def _answer(self, passes: list[Pass], answers: list[Answer]) -> None:
        places: list[Place] = []
        rows: list[npt.NDArray[np.float32]] = []
        for one in passes:
            for place, continuations in zip(one.places, one.continuations, strict=True):
                row = continuations.log_q()
                if one.broken:
                    row.fill(np.nan)
                if one.broken or np.isfinite(row).any():  # else it has no words for what it would say: no guess
                    places.append(place)
                    rows.append(row)
        if places:
            self._choose(places, torch.from_numpy(np.stack(rows)), answers)
