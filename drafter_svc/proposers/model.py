"""Guess with a small language model: one packed forward pass for all sessions of a step."""

from __future__ import annotations

import math

import torch

from drafter_svc.proposers import Guess, Turn
from drafter_svc.session import Session
from slipstream.engine import coupling, logits, proposal
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
        """The next token of each turn from its row of logits [R, V]."""
        if not turns:
            return []
        processed = logits.process(output, [_row(turn) for turn in turns])
        coupled = [i for i, turn in enumerate(turns) if turn.session.sampling.acceptance == "coupled"]
        drawn = [i for i in range(len(turns)) if i not in set(coupled)]
        guesses: dict[int, Guess | None] = {}
        for rows, guess in ((coupled, _best), (drawn, self._drawn)):
            if rows:
                guesses |= dict(zip(rows, guess([turns[i] for i in rows], processed[rows]), strict=True))
        broken = Internal("the draft model's numbers are broken for this session.", reason="BROKEN_NUMBERS")
        return [guesses[i] or broken for i in range(len(turns))]

    def _drawn(self, turns: list[Turn], processed: torch.Tensor) -> list[Guess | None]:
        """For the ratio rules: a token really drawn from the sparse q that is sent along."""
        ids, weights = proposal.quantise(processed, self._proposal_tokens)
        tokens = proposal.draw(ids, weights, [turn.session.sampling.seed for turn in turns], _positions(turns)).tolist()
        rows = zip(tokens, proposal.pack(ids, weights), strict=True)
        return [None if q is None else Guess(token, _log_share(q, token), q) for token, q in rows]


def _best(turns: list[Turn], processed: torch.Tensor) -> list[Guess | None]:
    """For the coupled rule: the token that wins with the target's own noise on the drafter's q."""
    samplings = [turn.session.sampling for turn in turns]
    greedy, seeds = [sampling.greedy for sampling in samplings], [sampling.seed for sampling in samplings]
    tokens, confidences = coupling.rank(processed, greedy, seeds, _positions(turns), 1)
    pairs = zip(tokens[:, 0].tolist(), confidences[:, 0].tolist(), strict=True)
    return [Guess(token, confidence) if token >= 0 else None for token, confidence in pairs]


def _positions(turns: list[Turn]) -> list[int]:
    """Index of the token that each turn guesses."""
    return [turn.computed + len(turn.pending) for turn in turns]


def _log_share(q: Proposal, token: int) -> float:
    return math.log(q.weights[q.token_ids.index(token)] / sum(q.weights))


def _row(turn: Turn) -> logits.Row:
    """What the turn's row of logits stands for; only penalties need the tokens before it."""
    session = turn.session
    if not session.sampling.penalised:
        return logits.Row(session.sampling)
    history = History(session.tokens[: session.prompt_length])
    history.append(session.tokens[session.prompt_length : turn.computed + len(turn.pending)])
    return logits.Row(session.sampling, history)
