"""The executor on the project's own engine, for CPUs and single GPUs.

A step is one packed forward pass over all sequences with their candidate trees; the acceptance rules read its logits;
the KV of the accepted paths is kept. The executor has no state of its own: weights and KV are the engine's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from slipstream.engine.engine import Engine, ModelOutput
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.sampler.coupled_sampling import likeliest
from slipstream.engine.sampler.logits_processor import logprobs
from slipstream.engine.segment import Segment
from slipstream.errors import Internal, SlipstreamError
from slipstream.speculation.selection import ROOT
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import AcceptanceResult, BrokenNumbers
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.estimators.cost_measurement import measure
from verifier_svc.execution.executor import ExecutorLimits, ScheduledSequence, StepOutcome
from verifier_svc.hidden_feed import ComputedRows, HiddenFeed


class EmbeddedExecutor:
    """Verifies trees by every acceptance rule."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.kv = engine, engine.kv
        self.limits = ExecutorLimits(engine.model.most_candidates)
        self.hidden_feed = HiddenFeed(engine)
        self.draft_feed = None

    @property
    def model(self) -> ModelInfo:
        return self.engine.model

    def measure_costs(self, curve: CostCurve, max_tokens: int, limit_s: float) -> None:
        measure(curve, self.engine, max_tokens, limit_s)

    @torch.inference_mode()
    def execute(self, step: list[ScheduledSequence]) -> list[StepOutcome]:
        segments = [_segment(scheduled) for scheduled in step]
        output = self._forward(step, segments)
        logits = output.logits
        inputs = _inputs(step, segments)
        results = dict(zip(inputs, judge(list(inputs.values()), logits), strict=True))
        results |= _with_logprobs(step, inputs, results, logits)
        results |= _with_windows(step, inputs, results, logits)
        _score_prompts(step, segments, logits)
        outcomes: list[StepOutcome] = []
        for index, segment in enumerate(segments):
            result = results.get(index)
            if isinstance(result, BrokenNumbers):
                outcomes.append(result.error or self._broken(segment))
                continue
            outcomes.append(result)
            self.kv.keep(segment, list(result.path) if result is not None else [])
        if output.hidden is not None:
            self.hidden_feed.deliver(_computed(step, segments, outcomes), output.hidden)
        return outcomes

    def _forward(self, step: list[ScheduledSequence], segments: list[Segment]) -> ModelOutput:
        request = self.hidden_feed.request(scheduled.session for scheduled in step)
        return self.engine.forward(segments) if request is None else self.engine.forward(segments, request)

    def _broken(self, segment: Segment) -> Internal:
        self.kv.disown(segment.sequence)
        return Internal("the target's logits are NaN or infinite for this session.", reason="BROKEN_NUMBERS")


def _segment(scheduled: ScheduledSequence) -> Segment:
    sequence, chosen = scheduled.session.sequence, scheduled.selection
    assert sequence is not None
    nodes, parents = list(chosen.token_ids), list(chosen.parents)
    if scheduled.window.token_ids:
        nodes += scheduled.window.token_ids
        parents += [each if each == ROOT else each + len(chosen) for each in scheduled.window.parents]
    if scheduled.session.top_prompt_logprobs is None or not scheduled.scored:
        return Segment(sequence, scheduled.pending, nodes, parents, want_logits=scheduled.complete)
    first = -len(scheduled.pending)
    wanted = [*range(first, first + scheduled.scored), *(range(-1, len(nodes)) if scheduled.complete else ())]
    return Segment(sequence, scheduled.pending, nodes, parents, wanted=wanted)


def _computed(
    step: list[ScheduledSequence], segments: list[Segment], outcomes: list[StepOutcome]
) -> list[ComputedRows]:
    """The step's rows of pending tokens and of accepted candidates; none of sequences that failed."""
    computed: list[ComputedRows] = []
    start = 0
    for scheduled, segment, outcome in zip(step, segments, outcomes, strict=True):
        count = len(segment.pending)
        path = outcome.path if isinstance(outcome, AcceptanceResult) else ()
        if not isinstance(outcome, SlipstreamError):
            rows = [*range(start, start + count), *(start + count + node for node in path)]
            computed.append(ComputedRows(scheduled.session, scheduled.computed, rows, scheduled.complete))
        start += segment.tokens
    return computed


def _inputs(step: list[ScheduledSequence], segments: list[Segment]) -> dict[int, VerifyInput]:
    """Inputs of the acceptance rules by index in the step, for the sequences that the step decides tokens for."""
    inputs: dict[int, VerifyInput] = {}
    row = 0
    for index, (scheduled, segment) in enumerate(zip(step, segments, strict=True)):
        if scheduled.complete:
            session = scheduled.session
            first = row if session.top_prompt_logprobs is None else row + scheduled.scored
            inputs[index] = VerifyInput(
                scheduled.selection,
                first,
                session.request.sampling,
                scheduled.base,
                session.history,
                session.constraint,
            )
        row += segment.logit_rows
    return inputs


def _with_logprobs(
    step: list[ScheduledSequence],
    inputs: dict[int, VerifyInput],
    results: dict[int, AcceptanceResult | BrokenNumbers],
    logits: torch.Tensor,
) -> dict[int, AcceptanceResult]:
    """Results with log-probabilities, by index, of the sessions that want them. Only accepted rows are computed."""
    wanted = {
        index: result
        for index, result in results.items()
        if step[index].session.request.top_logprobs is not None and isinstance(result, AcceptanceResult)
    }
    if not wanted:
        return {}
    rows, tokens, tops = list[int](), list[int](), list[int]()
    for index, result in wanted.items():
        verified = inputs[index]
        rows += [verified.first_row, *(verified.first_row + 1 + node for node in result.path)]
        tokens += [*(verified.selection.token_ids[node] for node in result.path), result.next_token]
        tops += [step[index].session.request.top_logprobs or 0] * (1 + len(result.path))
    where, chosen = (torch.tensor(each, device=logits.device) for each in (rows, tokens))
    found = iter(logprobs(logits[where], chosen, np.array(tops)).tokens())
    return {
        index: replace(result, logprobs=tuple(islice(found, 1 + len(result.path)))) for index, result in wanted.items()
    }


def _score_prompts(step: list[ScheduledSequence], segments: list[Segment], logits: torch.Tensor) -> None:
    """Notes the log-probabilities of the prompts' tokens whose rows the step computed, where they are wanted."""
    if not [scheduled for scheduled in step if scheduled.session.top_prompt_logprobs is not None]:
        return
    row = 0
    for scheduled, segment in zip(step, segments, strict=True):
        session, count, start = scheduled.session, scheduled.scored, scheduled.computed
        if count:
            chosen = torch.tensor(session.tokens[start + 1 : start + 1 + count], device=logits.device)
            tops = np.full(count, session.top_prompt_logprobs)
            found = logprobs(logits[row : row + count], chosen, tops).tokens()
            session.prompt_logprobs.update(enumerate(found, start + 1))
        row += segment.logit_rows


def _with_windows(
    step: list[ScheduledSequence],
    inputs: dict[int, VerifyInput],
    results: dict[int, AcceptanceResult | BrokenNumbers],
    logits: torch.Tensor,
) -> dict[int, AcceptanceResult | BrokenNumbers]:
    """Results with what the target finds likeliest behind the rows of lookahead windows, by index."""
    running = {index: result for index, result in results.items() if step[index].window.token_ids}
    if not running:
        return {}
    rows: list[int] = []
    for index in running:
        own = inputs[index].first_row + 1
        behind = own + len(inputs[index].selection)
        rows += [own + ROOT if row == ROOT else behind + row for row in step[index].window.newest]
    found = iter(likeliest(logits[torch.tensor(rows, device=logits.device)])) if rows else iter(())
    windows = {index: tuple(islice(found, len(step[index].window.newest))) for index in running}
    return {
        index: replace(result, window=windows[index])
        for index, result in running.items()
        if isinstance(result, AcceptanceResult)
    }
