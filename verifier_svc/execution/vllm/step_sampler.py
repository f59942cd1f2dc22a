"""Decides a step's tokens in vLLM's worker: logits processing and the acceptance rules, over whole batches.

Rows stand as vLLM packs them: for each request the row after its last committed token, then one after each candidate.
All of it is a function of logits and messages, so every rank of a tensor-parallel group decides the same. No statement
runs once for each row or request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.sampler import fused
from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import Cuts, forbid, logprobs, sharpen
from slipstream.speculation import noise
from slipstream.speculation.noise import Purpose
from verifier_svc.acceptance.batched_rejection import NO_DRAFT, Chains, Drawn, first_rows, leading, reject
from verifier_svc.execution.vllm.messages import (
    EXTRA,
    Indices,
    SampledStep,
    SessionParameters,
    StepLogprobs,
    StepMasks,
    StepProposals,
)
from verifier_svc.execution.vllm.session_table import NONE, SessionTable

PADDING = -1
"""vLLM's token id behind the last token of a row."""


@dataclass(slots=True)
class Batch:
    """The rows of one step. N requests, R rows."""

    names: list[str]
    logits: Tensor
    """[R, V] raw, as the model has them."""
    counts: Indices
    """[N] candidates of each request."""
    drafts: Tensor
    """[R - N] all candidates."""
    starts: Indices
    """[N] first row of each request."""
    owners: Indices
    """[R] index of each row's request."""
    depths: Indices
    """[R] candidates before the row."""
    positions: Indices
    """[R] index of the token that the row decides."""
    decided: npt.NDArray[np.bool_]
    """[N] False for prefills that go on."""

    def to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(array.copy()), self.logits.device)

    def rows_of(self, names: Any, requests: Indices, depths: Indices) -> Indices:
        """The rows of requests that are given by their index in `names`."""
        index = dict(zip(self.names, range(len(self.names)), strict=True))
        found: Indices = np.fromiter(map(index.__getitem__, names), np.int64, len(names))
        return self.starts[found[requests]] + depths


class StepSampler:
    """Owned by one worker. Per step: `begin`, then `decide` when the logits are there, then `take_sampled`."""

    def __init__(self, runner: Any, vocabulary: int, device: torch.device) -> None:
        self._runner = runner
        self._table = SessionTable(vocabulary, device)
        self._proposals: StepProposals | None = None
        self._masks: StepMasks | None = None
        self._sampled = SampledStep()
        self._flagged: tuple[list[str], Tensor] = ([], torch.empty(2, 0))
        """The step's requests; which of them are broken, and which dishonest."""
        self.active = False
        """False while vLLM profiles itself with rows that belong to no session."""

    def warm_up(self, dtype: torch.dtype) -> None:
        """Before the first step, which would wait for it: compiles what decides logits of this type on a GPU."""
        counts = self._table.adjustments.counts
        if fused.fuses(counts):
            fused.warm_up(counts.shape[1], dtype, counts.device)

    def begin(self, new_requests: list[Any], finished: set[str], proposals: StepProposals | None) -> None:
        """Learns the requests that a scheduler output adds and removes."""
        for name in finished:
            self._table.remove(name)
        for request in new_requests:
            parameters = SessionParameters.unpack(request.sampling_params.extra_args[EXTRA])
            self._table.remove(request.req_id)  # a step that failed may have added it
            self._table.add(request.req_id, parameters, request.prompt_token_ids)
        self._proposals = proposals

    def start_sampling(self, masks: StepMasks | None) -> None:
        self._masks, self._sampled, self.active = masks, SampledStep(), True
        self._flagged = [], torch.empty(2, 0)  # those of the last step, should this one decide nothing

    def take_sampled(self) -> SampledStep:
        """The step's decisions beside its tokens; waits for the device."""
        self.active = False
        names, flags = self._flagged
        broken, dishonest = flags.cpu().numpy()
        self._sampled.broken = list(compress(names, broken))
        self._sampled.dishonest = list(compress(names, dishonest))
        return self._sampled

    def decide(self, logits: Tensor, counts: Indices, drafts: Tensor) -> Tensor:
        """logits [R, V], candidates of each request [N] and all candidates [R - N] -> tokens int32 [N, most
        candidates + 1], PADDING behind each request's last. Every request gets a token, also where its numbers are
        broken."""
        batch = self._batch(logits, counts, drafts)
        sessions = self._table.sessions(batch.names, len(batch.names))
        rows = sessions[batch.owners]
        is_fused = fused.fuses(logits) and not rows["ratio"].any()
        tokens = self._decide_fused(batch, rows) if is_fused else self._decide(batch, rows)
        adjusted = np.flatnonzero((sessions["adjustment"] != NONE) & batch.decided)
        if len(adjusted):
            places = batch.to_device(sessions["adjustment"][adjusted])
            self._table.adjustments.count(places, tokens[batch.to_device(adjusted)])
        wanting = (sessions["top_logprobs"] != NONE) & batch.decided
        if wanting.any():
            self._sampled.logprobs = self._logprobs(batch, wanting, sessions["top_logprobs"], tokens)
        return tokens

    def _decide_fused(self, batch: Batch, rows: npt.NDArray[np.void]) -> Tensor:
        """On a GPU, where no session is under a ratio rule."""
        settings = np.zeros(len(rows), fused.SETTINGS)
        for name in ("top_k", "greedy", "temperature", "top_p", "floor", "repetition", "presence", "frequency"):
            settings[name] = rows[name]
        settings["key"] = noise.keys(rows["seed"], batch.positions, Purpose.COUPLED)
        settings["place"], settings["mask"] = rows["adjustment"], NONE
        settings["first"], settings["depth"] = (batch.starts - np.arange(len(batch.starts)))[batch.owners], batch.depths
        masks = self._masks
        if masks is not None:
            settings["mask"][batch.rows_of(masks.names, masks.requests, masks.depths)] = np.arange(len(masks.bits))
        requests = np.stack([batch.starts, batch.counts], axis=1)
        bits = None if masks is None else masks.bits
        table = self._table.adjustments.fused() if (rows["adjustment"] != NONE).any() else None
        decided = fused.decide(batch.logits, settings, requests, batch.drafts, bits, table)
        self._flagged = batch.names, decided.flags
        return decided.tokens

    def _decide(self, batch: Batch, rows: npt.NDArray[np.void]) -> Tensor:
        logits, counts = batch.logits, batch.counts
        behind = torch.full((len(rows),), NO_DRAFT, dtype=torch.int64, device=logits.device)
        behind[batch.to_device(np.flatnonzero(batch.depths < counts[batch.owners]))] = batch.drafts.long()
        batch = replace(batch, logits=logits.float(), drafts=behind)
        processed = self._process(batch, rows)
        # Rows under a ratio rule take part as greedy ones: that finds the broken among them, and the argmax.
        chosen, _ = choose(processed, rows["greedy"] | rows["ratio"], rows["seed"], batch.positions)
        accepted, dishonest = chosen == batch.drafts, torch.zeros(len(counts), dtype=torch.bool, device=logits.device)
        if rows["ratio"].any():
            dishonest = self._reject(batch, rows, processed, chosen, accepted)
        return self._emit(batch, chosen, accepted, dishonest)

    def _batch(self, logits: Tensor, counts: Indices, drafts: Tensor) -> Batch:
        size = len(counts)
        starts = first_rows(counts)
        owners = np.repeat(np.arange(size), counts + 1)
        depths = np.arange(len(owners)) - starts[owners]
        lengths = self._runner.input_batch.num_tokens_no_spec[:size].astype(np.int64)
        names = list(self._runner.input_batch.req_ids[:size])
        decided = ~self._runner.discard_request_mask.np[:size]
        positions = lengths[owners] + depths
        return Batch(names, logits, counts, drafts, starts, owners, depths, positions, decided)

    def _process(self, batch: Batch, rows: npt.NDArray[np.void]) -> Tensor:
        """What `logits_processor.process` makes of the rows."""
        processed, masks = batch.logits, self._masks
        if masks is not None:
            processed = forbid(processed, batch.rows_of(masks.names, masks.requests, masks.depths), masks.bits)
        adjusted = np.flatnonzero(rows["adjustment"] != NONE)
        if len(adjusted):
            processed = self._adjust(batch, processed, adjusted, rows[adjusted])
        cuts = Cuts(*(rows[name].copy() for name in ("top_k", "top_p", "floor")))
        return sharpen(processed, rows["temperature"].copy(), cuts)

    def _adjust(self, batch: Batch, processed: Tensor, index: Indices, rows: npt.NDArray[np.void]) -> Tensor:
        """Penalties and bias of these rows, as `logits_processor.process` computes them row by row."""
        table, places = self._table.adjustments, batch.to_device(rows["adjustment"])
        counts, lengths = table.counts[places], batch.depths[index]
        if lengths.any():  # the candidates before a row count as output
            ends = np.cumsum(lengths)
            path = np.repeat(batch.starts[batch.owners[index]] - (ends - lengths), lengths) + np.arange(ends[-1])
            where = batch.to_device(np.repeat(np.arange(len(index)), lengths))
            counts.index_put_((where, batch.drafts[batch.to_device(path)]), counts.new_ones(()), accumulate=True)
        names = ("repetition", "presence", "frequency")
        repetition, presence, frequency = (batch.to_device(rows[name])[:, None] for name in names)
        at = batch.to_device(index)
        values = processed[at]
        if (rows["repetition"] != 1.0).any():
            seen = table.prompt[places] | (counts > 0.0)
            values = torch.where(seen, torch.where(values > 0.0, values / repetition, values * repetition), values)
        if rows["presence"].any():
            values -= presence * (counts > 0.0)
        if rows["frequency"].any():
            values -= counts.mul_(frequency)
        if rows["biased"].any():
            values += table.bias[places]
        output = processed.clone() if processed is batch.logits else processed
        output[at] = values
        return output

    def _reject(
        self, batch: Batch, rows: npt.NDArray[np.void], processed: Tensor, chosen: Tensor, accepted: Tensor
    ) -> Tensor:
        """Writes into `chosen` and `accepted` what the ratio rule decides, and returns who is dishonest [N]."""
        ratio = np.flatnonzero(rows["ratio"])
        at, sessions = batch.to_device(ratio), np.unique(batch.owners[ratio])
        likeliest, one_hot = chosen[at], batch.to_device(np.flatnonzero(rows["greedy"][ratio]))
        p = processed[at].double().softmax(dim=-1)
        p[one_hot] = 0.0
        p[one_hot, likeliest[one_hot].clamp(min=0)] = 1.0
        p.masked_fill_((likeliest < 0)[:, None], torch.nan)
        chains = Chains(batch.counts[sessions], batch.drafts[at], rows["seed"][ratio], batch.positions[ratio])
        judged = reject(p, chains, self._drawn(batch, ratio))
        stops = batch.to_device(batch.starts[sessions]) + leading(judged.accepted, chains.counts)
        accepted[at] = judged.accepted
        chosen[at] = torch.where(judged.accepted, chains.drafts, likeliest)
        broken = chosen[stops] < 0
        chosen[stops] = judged.next_tokens.masked_fill(broken, -1)
        dishonest = torch.zeros(len(batch.counts), dtype=torch.bool, device=p.device)
        dishonest[batch.to_device(sessions)] = judged.dishonest & ~broken
        return dishonest

    def _drawn(self, batch: Batch, ratio: Indices) -> Drawn:
        """The proposals, by the index of their row in `ratio`."""
        if (given := self._proposals) is None:
            return Drawn(*np.zeros((3, 0), np.int64))
        rows = np.searchsorted(ratio, batch.rows_of(given.names, given.requests, given.depths))
        return Drawn(rows, given.token_ids, given.weights)

    def _emit(self, batch: Batch, chosen: Tensor, accepted: Tensor, dishonest: Tensor) -> Tensor:
        """Each request's choices up to the first that was not accepted; what stands behind them is PADDING."""
        columns = np.arange(int(batch.counts.max()) + 1)
        choices = chosen[batch.to_device(batch.starts[:, None] + np.minimum(columns, batch.counts[:, None]))]
        emitted = batch.to_device(columns) <= leading(accepted, batch.counts)[:, None]
        broken = (emitted & (choices < 0)).any(dim=-1)
        self._flagged = batch.names, torch.stack([broken, dishonest])
        return torch.where(emitted, choices.clamp(min=0), PADDING).to(torch.int32)

    def _logprobs(self, batch: Batch, wanting: npt.NDArray[np.bool_], tops: Indices, tokens: Tensor) -> StepLogprobs:
        """Log-probabilities are computed for the decided tokens alone, so these are fetched first."""
        emitted = np.where(wanting[:, None], tokens.cpu().numpy(), PADDING)
        requests, depths = np.nonzero(emitted != PADDING)
        logits = batch.logits[batch.to_device(batch.starts[requests] + depths)]
        decided = batch.to_device(emitted[requests, depths].astype(np.int64))
        lengths = np.bincount(requests, minlength=len(wanting))[wanting]
        return StepLogprobs(list(compress(batch.names, wanting)), lengths, logprobs(logits, decided, tops[requests]))
