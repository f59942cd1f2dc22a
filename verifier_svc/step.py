"""One verifier step on the model's own thread: a packed forward pass, the acceptance rules, the KV that is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.step import Segment
from slipstream.errors import Internal, SlipstreamError
from slipstream.selection import Selection
from verifier_svc.acceptance.judge import Case, judge
from verifier_svc.acceptance.verdict import Broken, Verdict
from verifier_svc.session import Session


@dataclass(frozen=True, slots=True)
class Turn:
    """What one session brings to one step."""

    session: Session
    base: int
    """Committed length."""
    computed: int
    """Leading tokens whose KV is right."""
    pending: list[int]
    """The tokens after those, as many as this step takes."""
    complete: bool
    """Whether `pending` reaches the last committed token, so that a token can follow."""
    selection: Selection


Outcome = Verdict | SlipstreamError | None
"""None: a prefill that goes on."""


@torch.inference_mode()
def perform(engine: Engine, turns: list[Turn], closing: list[Session]) -> list[Outcome]:
    """Runs a step. `closing` are sessions that ended since the last one; their KV is free first."""
    for session in closing:
        if session.sequence is not None:
            engine.close(session.sequence)
            session.sequence = None
    outcomes: list[Outcome] = [None] * len(turns)
    segments: dict[int, Segment] = {}
    for index, turn in enumerate(turns):
        try:
            segments[index] = _segment(engine, turn)
        except SlipstreamError as error:
            outcomes[index] = error
    if segments:
        logits = engine.forward(list(segments.values()))
        _decide(engine, turns, segments, logits, outcomes)
    return outcomes


def _segment(engine: Engine, turn: Turn) -> Segment:
    """Raises ResourceExhausted when a new session finds no KV memory: it is refused before any work is done for it."""
    session = turn.session
    if session.sequence is None:
        session.sequence = engine.open(session.max_length + session.max_draft_tokens)
    engine.rollback(session.sequence, turn.computed)
    chosen = turn.selection
    return Segment(session.sequence, turn.pending, list(chosen.token_ids), list(chosen.parents), turn.complete)


def _decide(
    engine: Engine, turns: list[Turn], segments: dict[int, Segment], logits: torch.Tensor, outcomes: list[Outcome]
) -> None:
    cases: dict[int, Case] = {}
    row = 0
    for index, segment in segments.items():
        turn = turns[index]
        if turn.complete:
            session = turn.session
            cases[index] = Case(turn.selection, row, session.sampling, turn.base, session.history)
        row += segment.logit_rows
    verdicts = dict(zip(cases, judge(list(cases.values()), logits), strict=True))
    for index, segment in segments.items():
        verdict = verdicts.get(index)
        if isinstance(verdict, Broken):
            outcomes[index] = Internal("the target's numbers are broken for this session.", reason="BROKEN_NUMBERS")
            continue
        outcomes[index] = verdict
        engine.keep(segment, list(verdict.path) if verdict is not None else [])
