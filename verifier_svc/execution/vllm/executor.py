"""The StepExecutor on vLLM's workers: chains of candidates, decided by the same rules as in the embedded executor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.model_info import DIGITS, ModelInfo
from slipstream.engine.segment import Segment
from slipstream.engine.vllm.scheduling import NULL_BLOCKS
from slipstream.errors import Internal, SlipstreamError
from slipstream.speculation.sampling_params import SamplingParams, TokenLogprobs
from slipstream.tokenizer.grammar import Mask
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.config import VerifierConfig
from verifier_svc.draft_feed import DraftFeed, StepDraft
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.estimators.cost_measurement import SESSIONS, MeasuredSteps, measure_steps
from verifier_svc.execution.executor import ExecutorLimits, ScheduledSequence, StepOutcome
from verifier_svc.execution.vllm.engine_core import EngineCore
from verifier_svc.execution.vllm.messages import Drafts, SampledStep, SessionParameters, StepLogprobs, StepMasks
from verifier_svc.execution.vllm.requests import RequestStep, WorkerRequests
from verifier_svc.session import Session

log = logging.getLogger(__name__)

Forbidden = dict[str, tuple[int, SlipstreamError]]
"""By request: the number of candidates after which its grammar cannot be followed, and why."""
Logprobs = dict[str, tuple[TokenLogprobs, ...]]
"""By request, one for each of its tokens."""


class VLLMExecutor:
    """Verifies chains. Sampling happens in the workers; grammars are followed here while the model runs."""

    hidden_feed = None

    def __init__(self, config: VerifierConfig, model: ModelInfo) -> None:
        """Raises what `EngineCore` raises."""
        self.core = EngineCore(config, model)
        graphs = self.core.graphs
        if graphs.notice:
            log.warning(graphs.notice)
        longest = min(model.max_length, self.core.max_length)
        self.model = replace(
            model,
            max_length=longest,
            dtype=self.core.dtype,
            arithmetic=arithmetic(model.revision, self.core.precision),
            forward_path=graphs.path,
            forward_notice=graphs.notice,
        )
        pool = BlockPool(self.core.blocks - NULL_BLOCKS, self.core.block_size)
        speculator = self.core.speculator
        self.requests = WorkerRequests(
            pool, longest, self.core.max_sequences, self.core.step_tokens, graphs, speculator
        )
        self.kv = self.requests.kv
        self.draft_feed = DraftFeed() if speculator is not None else None
        self.limits = ExecutorLimits(
            config.most_draft_tokens,
            verifies_trees=False,
            max_sequences=self.core.max_sequences,
            step_tokens=self.core.step_tokens,
            lossy_rules=False,
            scores_prompts=False,
        )

    def close(self) -> None:
        self.core.close()

    def measure_costs(self, curve: CostCurve, max_tokens: int, limit_s: float) -> None:
        longest = self.limits.max_candidates
        sequences = min(self.limits.max_sequences, SESSIONS[-1])
        measure_steps(MeasuredSteps(curve, self.kv, self._run_segments, max_tokens, sequences, longest), limit_s)

    def execute(self, step: list[ScheduledSequence]) -> list[StepOutcome]:
        requests = [_request(scheduled) for scheduled in step]
        forbidden: Forbidden = {}
        drafting = self.draft_feed is not None and self.draft_feed.wanted(each.session for each in step)
        sampled = self._run(requests, lambda: self._masks(step, requests, forbidden), drafting=drafting)
        try:
            likely = _by_request(sampled.logprobs)
            outcomes = [self._finish(*each, sampled, likely, forbidden) for each in zip(step, requests, strict=True)]
        except BaseException:
            self.requests.step_failed(requests)
            raise
        if sampled.drafts is not None:
            self._deliver(step, requests, outcomes, sampled.drafts)
        return outcomes

    def _run(
        self, requests: Sequence[RequestStep], masks: Callable[[], StepMasks | None], *, drafting: bool = True
    ) -> SampledStep:
        """A step that failed leaves the KV of committed tokens as it was, and may run again."""
        try:
            sampled = self.core.run(self.requests.schedule(requests, drafting=drafting), masks)
            self.requests.step_succeeded(requests, sampled)
        except BaseException:
            self.requests.step_failed(requests)
            raise
        return sampled

    def _run_segments(self, segments: list[Segment]) -> None:
        """A step of sequences that belong to no session, for measurements."""
        plain = partial(SessionParameters, SamplingParams(temperature=0.0), 1)
        requests = [RequestStep(each, [*each.sequence.tokens, *each.pending], plain) for each in segments]
        self._run(requests, lambda: None)

    def _finish(
        self,
        scheduled: ScheduledSequence,
        request: RequestStep,
        sampled: SampledStep,
        likely: Logprobs,
        forbidden: Forbidden,
    ) -> StepOutcome:
        """Keeps the KV of what was decided; returns the outcome."""
        outcome = self._outcome(scheduled, request, sampled, likely, forbidden)
        if not isinstance(outcome, SlipstreamError):
            self.kv.keep(request.segment, [] if outcome is None else list(outcome.path))
        return outcome

    def _deliver(
        self, step: list[ScheduledSequence], requests: list[RequestStep], outcomes: list[StepOutcome], drafts: Drafts
    ) -> None:
        """Gives the sessions that decided tokens what was drafted behind them."""
        assert self.draft_feed is not None
        rows = dict(
            zip(drafts.names, zip(drafts.token_ids.tolist(), drafts.log_probs.tolist(), strict=True), strict=True)
        )
        for scheduled, request, outcome in zip(step, requests, outcomes, strict=True):
            if isinstance(outcome, AcceptanceResult):
                base = scheduled.base + len(outcome.path) + 1
                tokens, log_probs = rows[self.requests.name_of(request.segment.sequence)]
                self.draft_feed.deliver(scheduled.session, StepDraft(base, tokens, log_probs))

    def _outcome(
        self,
        scheduled: ScheduledSequence,
        request: RequestStep,
        sampled: SampledStep,
        likely: Logprobs,
        forbidden: Forbidden,
    ) -> StepOutcome:
        if not scheduled.complete:
            return None
        name = self.requests.name_of(request.segment.sequence)
        tokens = sampled.tokens[name]
        if name in forbidden and len(tokens) > forbidden[name][0]:
            return forbidden[name][1]
        if name in sampled.broken:
            self.kv.disown(request.segment.sequence)
            return Internal("the target's logits are NaN or infinite for this session.", reason="BROKEN_NUMBERS")
        path = tuple(range(len(tokens) - 1))
        return AcceptanceResult(path, tokens[-1], dishonest=name in sampled.dishonest, logprobs=likely.get(name, ()))

    def _masks(
        self, step: list[ScheduledSequence], requests: list[RequestStep], forbidden: Forbidden
    ) -> StepMasks | None:
        names, owners, depths, bits = list[str](), list[int](), list[int](), list[Mask]()
        for scheduled, request in zip(step, requests, strict=True):
            if scheduled.session.constraint is not None and scheduled.complete:
                name = self.requests.name_of(request.segment.sequence)
                found, failed = _chain_masks(scheduled)
                if failed is not None:
                    forbidden[name] = failed
                owners += [len(names)] * len(found)
                depths += found.keys()
                bits += found.values()
                names.append(name)
        return StepMasks(names, np.array(owners), np.array(depths), np.stack(bits)) if bits else None


def arithmetic(revision: str, precision: str) -> str:
    """The name of vLLM's arithmetic for these weights. It promises the distribution alone: neither version nor
    device is in it."""
    return "/".join((revision.removeprefix("local-")[:DIGITS], precision, "vllm"))


def _request(scheduled: ScheduledSequence) -> RequestStep:
    session, chosen = scheduled.session, scheduled.selection
    assert session.sequence is not None
    segment = Segment(
        session.sequence,
        scheduled.pending,
        list(chosen.token_ids),
        list(chosen.parents),
        want_logits=scheduled.complete,
    )
    proposals = chosen.distributions if session.request.sampling.drawn else ()
    return RequestStep(segment, session.tokens, partial(_parameters, session), proposals)


def _parameters(session: Session) -> SessionParameters:
    return SessionParameters(session.request.sampling, session.request.prompt_length, session.request.top_logprobs)


def _chain_masks(scheduled: ScheduledSequence) -> tuple[dict[int, Mask], tuple[int, SlipstreamError] | None]:
    """The grammar's masks along the chain by the number of candidates before, as far as it allows these; and after how
    many it cannot be followed, if that is so. An error counts only if the target chooses the candidates before it."""
    constraint, chain = scheduled.session.constraint, scheduled.selection.token_ids
    assert constraint is not None
    masks: dict[int, Mask] = {}
    for depth in range(len(chain) + 1):
        try:
            mask = constraint.after(chain[:depth])
        except SlipstreamError as error:
            return masks, (depth, error)
        if mask is None:  # after an end of text
            continue
        masks[depth] = mask
        if depth < len(chain) and not mask[chain[depth] >> 3] >> (chain[depth] & 7) & 1:
            break  # never chosen, so nothing below matters
    return masks, None


def _by_request(logprobs: StepLogprobs | None) -> Logprobs:
    if logprobs is None:
        return {}
    tokens = iter(logprobs.arrays.tokens())
    return {name: tuple(islice(tokens, size)) for name, size in zip(logprobs.names, logprobs.lengths, strict=True)}
