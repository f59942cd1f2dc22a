"""Guess with a small language model: one packed forward pass for all sessions of a step.

A step expands several nodes of each session's tree at once: the tree below the committed prefix is part of the pass, so
no KV of a guess outlives the step, and a branch that dies costs nothing. Trees are small (tens of nodes) and passes of
a small model are all overhead, so computing them again is cheaper than keeping their rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from drafter_svc.proposers import Answer, DraftRequest, ProposedNode
from drafter_svc.session import DraftSession
from drafter_svc.tree import DraftNode
from slipstream.engine.engine import Engine
from slipstream.engine.sampler import coupled_sampling, draft_distribution, logits_processor
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.engine.segment import Segment
from slipstream.errors import Internal, SlipstreamError
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.tokenizer.grammar import Grammars, Mask


class ModelProposer:
    """`width` guesses below each expanded node; `proposal_tokens` bounds the support of the honest q. With `grammars`
    a structured output is guessed inside its grammar."""

    draws = True

    def __init__(
        self,
        engine: Engine,
        *,
        width: int,
        max_nodes: int,
        proposal_tokens: int,
        sharpness: float = 1.0,
        grammars: Grammars | None = None,
    ) -> None:
        self._engine = engine
        self._width = width
        self._max_nodes = max_nodes
        self._proposal_tokens = proposal_tokens
        self._sharpness = sharpness
        self._grammars = grammars

    @torch.inference_mode()
    def grow(self, turns: list[DraftRequest]) -> list[Answer]:
        answers: list[Answer] = [[] for _ in turns]
        segments: dict[int, Segment] = {}
        for index, turn in enumerate(turns):
            try:
                segments[index] = self._segment(turn)
            except SlipstreamError as error:
                answers[index] = error
        if segments:
            output = self._engine.forward(list(segments.values())).logits
            for segment in segments.values():
                self._engine.keep(segment, [])
            self._guess(turns, segments, output, answers)
        return answers

    def close(self, session: DraftSession) -> None:
        if session.sequence is not None:
            self._engine.close(session.sequence)
            session.sequence = None

    def _segment(self, turn: DraftRequest) -> Segment:
        """The turn's tokens on the session's KV. Raises ResourceExhausted when there is no room for a new session."""
        session = turn.session
        if session.sequence is None:
            session.sequence = self._engine.open(session.max_length + self._max_nodes)
        self._engine.rollback(session.sequence, turn.computed)
        return Segment(session.sequence, turn.pending, turn.tokens, turn.parents, want_logits=bool(turn.expand))

    def _guess(
        self, turns: list[DraftRequest], segments: dict[int, Segment], output: torch.Tensor, answers: list[Answer]
    ) -> None:
        """Guesses below every expanded node. output: [rows, V]; a segment's rows are its root, then its nodes."""
        places: list[Place] = []
        row = 0
        for index, segment in segments.items():
            turn = turns[index]
            expanded = zip(turn.expand, turn.starts, strict=True)
            places += [Place(index, turn, node, start, row + 1 + node) for node, start in expanded]
            row += segment.logit_rows
        if places:
            self._choose(places, output[[place.row for place in places]], answers)

    def _choose(self, places: list[Place], rows: torch.Tensor, answers: list[Answer]) -> None:
        """Guesses below every place from its log q, float32 [places, V], unprocessed."""
        processed = logits_processor.process(rows, [replace(place.context, mask=self._mask(place)) for place in places])
        for coupled in (True, False):
            chosen = [i for i, place in enumerate(places) if place.coupled == coupled]
            if chosen:
                guess = self._ranked if coupled else self._drawn
                some = [places[i] for i in chosen]
                for place, guesses in zip(some, guess(some, processed[chosen]), strict=True):
                    _gather(answers, place, guesses)

    def _mask(self, place: Place) -> Mask | None:
        """What the session's grammar allows there; None where it has none, or it is not compiled yet, or cannot be
        followed: what lies outside is dropped by the verifier."""
        session = place.turn.session
        if session.structure is None or self._grammars is None:
            return None
        if session.grammar is None:
            session.grammar = self._grammars.compile(session.structure, session.cache_salt)
        try:
            if session.cursor is None and session.grammar.done():
                session.cursor = session.grammar.result().cursor()
            return session.cursor.mask(place.output) if session.cursor is not None else None
        except SlipstreamError:
            return None

    def _ranked(self, places: list[Place], processed: torch.Tensor) -> list[list[ProposedNode]]:
        """For the coupled rule: the likeliest winners with the target's own noise on the drafter's q. The first is the
        guess, the others what replaces it when it is wrong."""
        samplings = [place.turn.session.sampling for place in places]
        greedy, seeds = [sampling.greedy for sampling in samplings], [sampling.seed for sampling in samplings]
        positions = [place.position for place in places]
        tokens, confidences = coupled_sampling.rank(processed, greedy, seeds, positions, self._width, self._sharpness)
        rows = zip(places, tokens.tolist(), confidences.tolist(), strict=True)
        return [
            [ProposedNode(place.start, token, sure) for token, sure in zip(row, confidence, strict=True) if token >= 0]
            for place, row, confidence in rows
        ]

    def _drawn(self, places: list[Place], processed: torch.Tensor) -> list[list[ProposedNode]]:
        """For the ratio rules: tokens really drawn from the sparse q that is sent along, siblings without replacement.

        The session's stream is read while its loop may move it on: then the nodes of these places are dead, and so is
        what was drawn for them.
        """
        ids, weights = draft_distribution.quantise(processed, self._proposal_tokens)
        sessions = [place.turn.session for place in places]
        weights[[session.sampling.greedy for session in sessions], 1:] = 0  # p is one-hot: so be q
        streams, nodes = [session.stream for session in sessions], [place.start.number for place in places]
        tokens = draft_distribution.draw(ids, weights, streams, nodes, self._width).tolist()
        rows = zip(places, tokens, draft_distribution.pack(ids, weights), strict=True)
        return [[] if q is None else siblings(place, drawn, q) for place, drawn, q in rows]


@dataclass(frozen=True, slots=True)
class Place:
    """One node to guess on from."""

    index: int
    """Of its turn."""
    turn: DraftRequest
    node: int
    """Index in the turn's tree, or -1 for the root."""
    start: DraftNode
    """The node itself."""
    row: int
    """Of the step's logits."""

    @property
    def coupled(self) -> bool:
        return self.turn.session.sampling.coupled

    @property
    def position(self) -> int:
        """Index of the token that is guessed."""
        return self.turn.computed + len(self.turn.pending) + len(self.turn.path(self.node))

    @property
    def output(self) -> list[int]:
        """The output tokens before this node's successor, guesses included."""
        return [*self._committed, *self.turn.path(self.node)]

    @property
    def context(self) -> logits_processor.SampledRow:
        """What the row of logits stands for; only penalties need the tokens before it."""
        session = self.turn.session
        if not session.sampling.penalised:
            return logits_processor.SampledRow(session.sampling)
        history = TokenHistory(session.tokens[: session.prompt_length])
        history.append(self._committed)
        return logits_processor.SampledRow(session.sampling, history, tuple(self.turn.path(self.node)))

    @property
    def _committed(self) -> list[int]:
        session, turn = self.turn.session, self.turn
        return session.tokens[session.prompt_length : turn.computed + len(turn.pending)]


def _gather(answers: list[Answer], place: Place, guesses: list[ProposedNode]) -> None:
    answer = answers[place.index]
    if not isinstance(answer, list):
        return
    if guesses:
        answer.extend(guesses)
    else:
        answers[place.index] = Internal(
            "the draft model's numbers are broken for this session.", reason="BROKEN_NUMBERS"
        )


def siblings(place: Place, tokens: list[int], q: DraftDistribution) -> list[ProposedNode]:
    """The drawn tokens in the order of drawing, each with what it was drawn from: q without those before it.

    So whatever the first ones have met with, the next one's law given them is what it says. `recursive` takes any
    number of siblings; the other rules judge a chain.
    """
    count = len(q.token_ids) if place.turn.session.sampling.acceptance == "recursive" else 1
    drawn = tokens[: min(count, len(q.token_ids))]
    return [
        ProposedNode(place.start, token, _log_share(q, token), q.without(drawn[:index]))
        for index, token in enumerate(drawn)
    ]


def _log_share(q: DraftDistribution, token: int) -> float:
    return math.log(q.weights[q.token_ids.index(token)] / sum(q.weights))
