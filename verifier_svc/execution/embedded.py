"""One verifier step on the model's own thread: a packed forward pass, the acceptance rules, the KV that is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.sampler.logits_processor import logprobs
from slipstream.engine.segment import Segment
from slipstream.errors import Internal, SlipstreamError
from slipstream.speculation.selection import Selection
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers
from verifier_svc.session import Session


class ScheduledSequence(NamedTuple):
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

    @property
    def tokens(self) -> int:
        """KV rows that it writes."""
        return len(self.pending) + len(self.selection)


Outcome = AcceptanceResult | SlipstreamError | None
"""None: a prefill that goes on."""


@torch.inference_mode()
def perform(engine: Engine, turns: list[ScheduledSequence]) -> list[Outcome]:
    """Runs a step, for which every session's sequence has grown already."""
    segments = [_segment(turn) for turn in turns]
    return _decide(engine, turns, segments, engine.forward(segments).logits)


def _told(
    turns: list[ScheduledSequence],
    cases: dict[int, VerifyInput],
    verdicts: dict[int, AcceptanceResult | BrokenNumbers],
    logits: torch.Tensor,
) -> dict[int, AcceptanceResult]:
    """The verdicts of sessions that asked for log-probabilities, with them. Rows that were not accepted cost nothing,
    nor do other sessions."""
    asked = {
        index: verdict
        for index, verdict in verdicts.items()
        if turns[index].session.top_logprobs is not None and isinstance(verdict, AcceptanceResult)
    }
    if not asked:
        return {}
    rows, tokens, tops = list[int](), list[int](), list[int]()
    for index, verdict in asked.items():
        case = cases[index]
        rows += [case.first_row, *(case.first_row + 1 + node for node in verdict.path)]
        tokens += [*(case.selection.token_ids[node] for node in verdict.path), verdict.next_token]
        tops += [turns[index].session.top_logprobs or 0] * (1 + len(verdict.path))
    likely = iter(logprobs(logits[torch.tensor(rows, device=logits.device)], tokens, tops))
    return {
        index: replace(verdict, logprobs=tuple(islice(likely, 1 + len(verdict.path))))
        for index, verdict in asked.items()
    }


def _broken(engine: Engine, segment: Segment) -> Internal:
    engine.disown(segment.sequence)
    return Internal("the target's numbers are broken for this session.", reason="BROKEN_NUMBERS")


def _segment(turn: ScheduledSequence) -> Segment:
    assert turn.session.sequence is not None
    chosen = turn.selection
    return Segment(
        turn.session.sequence, turn.pending, list(chosen.token_ids), list(chosen.parents), want_logits=turn.complete
    )


def _decide(
    engine: Engine, turns: list[ScheduledSequence], segments: list[Segment], logits: torch.Tensor
) -> list[Outcome]:
    cases: dict[int, VerifyInput] = {}
    row = 0
    for index, (turn, segment) in enumerate(zip(turns, segments, strict=True)):
        if turn.complete:
            session = turn.session
            cases[index] = VerifyInput(
                turn.selection, row, session.sampling, turn.base, session.history, session.constraint
            )
        row += segment.logit_rows
    verdicts = dict(zip(cases, judge(list(cases.values()), logits), strict=True))
    verdicts |= _told(turns, cases, verdicts, logits)
    outcomes: list[Outcome] = []
    for index, segment in enumerate(segments):
        verdict = verdicts.get(index)
        if isinstance(verdict, BrokenNumbers):
            outcomes.append(verdict.error or _broken(engine, segment))
            continue
        outcomes.append(verdict)
        engine.keep(segment, list(verdict.path) if verdict is not None else [])
    return outcomes
