"""Guess with a small language model: one packed forward pass for all sessions of a step."""

from __future__ import annotations

import torch

from drafter_svc.proposers import Guess, Turn
from drafter_svc.session import Session
from slipstream.engine import coupling, logits, proposing
from slipstream.engine.engine import Engine
from slipstream.engine.history import History
from slipstream.engine.step import Segment
from slipstream.errors import Internal, SlipstreamError
from slipstream.proposal import Proposal


class ModelProposer:
    """`proposal_tokens` bounds the support of the honest q that the ratio rules are sent."""

    def __init__(self, engine: Engine, proposal_tokens: int) -> None:
        self._engine = engine
        self._proposal_tokens = proposal_tokens

    @torch.inference_mode()
    def grow(self, turns: list[Turn]) -> list[Guess | SlipstreamError | None]:
        answers: list[Guess | SlipstreamError | None] = [None] * len(turns)
        segments: dict[int, Segment] = {}
        for index, turn in enumerate(turns):
            try:
                segments[index] = self._segment(turn)
            except SlipstreamError as error:
                answers[index] = error
        if segments:
            output = self._engine.forward(list(segments.values()))
            for segment in segments.values():
                self._engine.keep(segment, [])
            ready = [index for index in segments if turns[index].complete]
            guesses = self._guess([turns[index] for index in ready], output)
            answers = [guesses[ready.index(i)] if i in ready else answer for i, answer in enumerate(answers)]
        return answers

    def close(self, session: Session) -> None:
        if session.sequence is not None:
            self._engine.close(session.sequence)
            session.sequence = None

    def _segment(self, turn: Turn) -> Segment:
        """The turn's tokens on the session's KV. Raises ResourceExhausted when there is no room for a new session."""
        session = turn.session
        if session.sequence is None:
            session.sequence = self._engine.open(session.max_length)
        self._engine.rollback(session.sequence, turn.computed)
        return Segment(session.sequence, turn.pending, want_logits=turn.complete)

    def _guess(self, turns: list[Turn], output: torch.Tensor) -> list[Guess | SlipstreamError]:
        """The best next token of each turn from its row of logits [R, V]."""
        if not turns:
            return []
        samplings = [turn.session.sampling for turn in turns]
        processed = logits.process(output, [_row(turn) for turn in turns])
        tokens, confidences = coupling.rank(
            processed,
            [sampling.greedy for sampling in samplings],
            [sampling.seed for sampling in samplings],
            [turn.computed + len(turn.pending) for turn in turns],
            1,
        )
        guesses: list[Guess | SlipstreamError] = []
        for token, confidence in zip(tokens[:, 0].tolist(), confidences[:, 0].tolist(), strict=True):
            broken = Internal("the draft model's numbers are broken for this session.", reason="BROKEN_NUMBERS")
            guesses.append(Guess(token, min(confidence, 0.0)) if token >= 0 else broken)
        return guesses
