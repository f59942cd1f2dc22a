"""Decides a step's tokens in vLLM's worker: logits processing and the coupled rule, over whole batches.

Rows stand as vLLM packs them: for each request the row after its last committed token, then one after each candidate.
All of it is a function of logits and messages, so every rank of a tensor-parallel group decides the same. Only sessions
under a ratio rule are judged one by one, by the same code as in the embedded executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import Cuts, forbid, logprobs, sharpen
from slipstream.speculation.selection import ROOT, Selection
from slipstream.tokenizer.grammar import Mask
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.acceptance.result import BrokenNumbers
from verifier_svc.execution.vllm.messages import (
    EXTRA,
    ChainMasks,
    Masks,
    Proposals,
    SampledStep,
    SessionParameters,
)
from verifier_svc.execution.vllm.session_table import SessionTable

PADDING = -1
"""vLLM's token id behind the last token of a row."""
NO_DRAFT = -2
"""A draft token that no choice equals."""


@dataclass(slots=True)
class Batch:
    """The rows of one step. N requests, R rows."""

    names: list[str]
    logits: Tensor
    """float32 [R, V], raw."""
    counts: npt.NDArray[np.int64]
    """[N] candidates of each request."""
    drafts: Tensor
    """int [R - N] all candidates."""
    starts: npt.NDArray[np.int64]
    """[N] first row of each request."""
    owners: npt.NDArray[np.int64]
    """[R] index of each row's request."""
    depths: npt.NDArray[np.int64]
    """[R] candidates before the row."""
    positions: npt.NDArray[np.int64]
    """[R] index of the token that the row decides."""

    def to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.logits.device, non_blocking=True)


class StepSampler:
    """Owned by one worker. Per step: `begin`, then `decide` when the logits are there, then `take_sampled`."""

    def __init__(self, runner: Any, vocabulary: int, device: torch.device) -> None:
        self._runner = runner
        self._table = SessionTable(vocabulary, device)
        self._proposals: Proposals = {}
        self._masks: Masks = {}
        self._sampled = SampledStep()
        self._broken: tuple[list[str], Tensor] = ([], torch.empty(0))
        self.active = False
        """False while vLLM profiles itself with rows that belong to no session."""

    def begin(self, new_requests: list[Any], finished: set[str], proposals: Proposals) -> None:
        """Learns the requests that a scheduler output adds and removes."""
        for name in finished:
            self._table.remove(name)
        for request in new_requests:
            parameters = SessionParameters.unpack(request.sampling_params.extra_args[EXTRA])
            self._table.remove(request.req_id)  # a step that failed may have added it
            self._table.add(request.req_id, parameters, request.prompt_token_ids)
        self._proposals = proposals

    def start_sampling(self, masks: Masks) -> None:
        self._masks, self._sampled, self.active = masks, SampledStep(), True

    def take_sampled(self) -> SampledStep:
        """The step's decisions beside its tokens; waits for the device."""
        self.active = False
        names, flags = self._broken
        self._sampled.broken += [names[index] for index in np.flatnonzero(flags.cpu().numpy())]
        return self._sampled

    def decide(self, logits: Tensor, counts: npt.NDArray[np.int64], drafts: Tensor) -> Tensor:
        """logits [R, V], candidates of each request [N] and all candidates [R - N] -> tokens int32 [N, most
        candidates + 1], PADDING behind each request's last. Every request gets a token, also where its numbers are
        broken."""
        batch = self._batch(logits, counts, drafts)
        rows = self._table.rows(batch.names, batch.owners)
        processed = self._mask(batch)
        if rows["adjusted"].any():
            processed = self._adjust(batch, processed, np.flatnonzero(rows["adjusted"]))
        cuts = Cuts(*(rows[name].copy() for name in ("top_k", "top_p", "floor")))
        processed = sharpen(processed, rows["temperature"].copy(), cuts)
        chosen, _ = choose(processed, rows["greedy"], rows["seed"], batch.positions)
        tokens = self._accept(batch, chosen)
        if self._table.ratio or self._table.adjustments or self._table.top_logprobs:
            decided = np.flatnonzero(~self._runner.discard_request_mask.np[: len(batch.names)])
            named = {batch.names[index]: int(index) for index in decided}
            self._judge_ratio(batch, named, tokens)
            self._count(named, tokens)
            self._add_logprobs(batch, named, tokens)
        return tokens

    def _batch(self, logits: Tensor, counts: npt.NDArray[np.int64], drafts: Tensor) -> Batch:
        size = len(counts)
        ends = np.cumsum(counts + 1)
        starts = ends - counts - 1
        owners = np.repeat(np.arange(size), counts + 1)
        depths = np.arange(ends[-1]) - starts[owners]
        lengths = self._runner.input_batch.num_tokens_no_spec[:size].astype(np.int64)
        names = list(self._runner.input_batch.req_ids[:size])
        return Batch(names, logits.float(), counts, drafts, starts, owners, depths, lengths[owners] + depths)

    def _mask(self, batch: Batch) -> Tensor:
        if not self._masks:
            return batch.logits
        starts = dict(zip(batch.names, batch.starts, strict=True))
        rows = np.concatenate([starts[name] + masks.depths for name, masks in self._masks.items()])
        return forbid(batch.logits, rows, np.concatenate([masks.bits for masks in self._masks.values()]))

    def _adjust(self, batch: Batch, processed: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Penalties and bias of these rows, as `logits_processor.process` computes them row by row."""
        sessions, places = np.unique(batch.owners[rows], return_inverse=True)
        found = [self._table.adjustments[batch.names[session]] for session in sessions]
        index, place = batch.to_device(rows), batch.to_device(places)
        counts = torch.stack([each.counts for each in found])[place]
        lengths = batch.depths[rows]
        if lengths.any():
            first = (batch.starts - np.arange(len(batch.starts)))[batch.owners[rows]]
            ends = np.cumsum(lengths)
            path = np.repeat(first - (ends - lengths), lengths) + np.arange(ends[-1])
            where = batch.to_device(np.repeat(np.arange(len(rows)), lengths))
            tokens = batch.drafts[batch.to_device(path)].long()
            counts.index_put_((where, tokens), counts.new_ones(()), accumulate=True)
        seen = torch.stack([each.prompt for each in found])[place] | (counts > 0.0)
        penalties = np.array([[each.repetition, each.presence, each.frequency] for each in found], np.float32)[places]
        repetition, presence, frequency = batch.to_device(penalties).unsqueeze(-1).unbind(1)
        values = processed[index]
        values = torch.where(seen, torch.where(values > 0.0, values / repetition, values * repetition), values)
        values = values - presence * (counts > 0.0) - frequency * counts
        values += torch.stack([each.bias for each in found])[place]
        output = processed.clone() if processed is batch.logits else processed
        output[index] = values
        return output

    def _accept(self, batch: Batch, chosen: Tensor) -> Tensor:
        """Each request's choices up to the first that its draft is not; what stands behind them is PADDING."""
        width = int(batch.counts.max()) + 1
        columns = np.arange(width)
        at = batch.to_device(batch.starts[:, None] + np.minimum(columns, batch.counts[:, None]))
        choices = chosen[at]
        drafts = torch.full_like(choices, NO_DRAFT)
        inner = batch.depths < batch.counts[batch.owners]
        owners, depths = batch.to_device(batch.owners[inner]), batch.to_device(batch.depths[inner])
        drafts[owners, depths] = batch.drafts.to(drafts.dtype)
        accepted = (choices == drafts).cumprod(dim=-1).sum(dim=-1, keepdim=True)
        emitted = batch.to_device(columns) <= accepted
        self._broken = batch.names, (emitted & (choices < 0)).any(dim=-1)
        return torch.where(emitted, choices.clamp(min=0), PADDING).to(torch.int32)

    def _count(self, named: dict[str, int], tokens: Tensor) -> None:
        """Adds the decided tokens to the counts of sessions with penalties."""
        for name in self._table.adjustments.keys() & named.keys():
            row = tokens[named[name]]
            self._table.adjustments[name].counts.scatter_add_(0, row.clamp(min=0).long(), (row >= 0).float())

    def _judge_ratio(self, batch: Batch, named: dict[str, int], tokens: Tensor) -> None:
        """Replaces the tokens of sessions under a ratio rule."""
        names = [name for name in self._table.ratio if name in named]
        if not names:
            return
        cases = [self._case(batch, name, named[name]) for name in names]
        for name, case, result in zip(names, cases, judge(cases, batch.logits), strict=True):
            row = tokens[named[name]]
            row.fill_(PADDING)
            row[0] = 0
            self._broken[1][named[name]] = isinstance(result, BrokenNumbers)
            if isinstance(result, BrokenNumbers):
                continue
            decided = [*(case.selection.token_ids[node] for node in result.path), result.next_token]
            row[: len(decided)] = torch.tensor(decided, dtype=row.dtype)
            if (history := self._table.ratio[name].history) is not None:
                history.append(decided)
            if result.dishonest:
                self._sampled.dishonest.append(name)

    def _case(self, batch: Batch, name: str, index: int) -> VerifyInput:
        session, start, count = self._table.ratio[name], int(batch.starts[index]), int(batch.counts[index])
        selection = chain(batch.drafts[start - index : start - index + count].tolist(), self._proposals.get(name, ()))
        masks = self._masks.get(name)
        grammar = None if masks is None else _PathMasks(masks)
        return VerifyInput(selection, start, session.sampling, int(batch.positions[start]), session.history, grammar)

    def _add_logprobs(self, batch: Batch, named: dict[str, int], tokens: Tensor) -> None:
        """Log-probabilities of the decided tokens alone, for the sessions that want them."""
        for name in self._table.top_logprobs.keys() & named.keys():
            index = named[name]
            decided = [token for token in tokens[index].tolist() if token >= 0]
            start = int(batch.starts[index])
            tops = [self._table.top_logprobs[name]] * len(decided)
            self._sampled.logprobs[name] = tuple(logprobs(batch.logits[start : start + len(decided)], decided, tops))


class _PathMasks:
    """The masks of one chain, as the acceptance rules ask for them."""

    def __init__(self, masks: ChainMasks) -> None:
        self._bits = dict(zip(masks.depths.tolist(), masks.bits, strict=True))

    def after(self, path: tuple[int, ...]) -> Mask | None:
        return self._bits.get(len(path))


def chain(token_ids: list[int], distributions: Any) -> Selection:
    """Candidates of which each stands below the one before."""
    size = len(token_ids)
    given = tuple(distributions) if distributions else (None,) * size
    zeros = (0.0,) * size
    return Selection(tuple(token_ids), (ROOT, *range(size))[:size], tuple(range(1, size + 1)), zeros, zeros, given)
