"""Decides a step's tokens in vLLM's worker: logits processing and the acceptance rules, over whole batches.

Rows stand as vLLM packs them: for each request the row after its last committed token, then one after each candidate.
All of it is a function of logits and messages, so every rank of a tensor-parallel group decides the same. No statement
runs once for each row or request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.sampler import fused
from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.engine.sampler.logits_processor import CUTS, NO_CUTS, forbid, logprobs, sharpen
from slipstream.speculation import noise
from slipstream.speculation.noise import Purpose
from verifier_svc.acceptance.batched_rejection import NO_DRAFT, Chains, Drawn, first_rows, leading, reject
from verifier_svc.execution.vllm.messages import (
    Drafts,
    Indices,
    SampledStep,
    SessionParameters,
    StepLogprobs,
    StepMasks,
    StepProposals,
)
from verifier_svc.execution.vllm.session_table import NONE, SessionTable

UNFUSED = tuple(name for name in CUTS.fields or () if name not in (fused.SETTINGS.fields or ()))
"""Cuts that the kernels of a GPU do not know: torch makes them."""


class StepRows(NamedTuple):
    """Which rows of logits a step has, in the runner's order. N requests."""

    names: list[str]
    counts: Indices
    """[N] candidates of each request."""
    lengths: Indices
    """[N] tokens of each before its candidates."""
    decided: npt.NDArray[np.bool_]
    """[N] False for prefills that go on."""


class Batch(NamedTuple):
    """The rows of one step. N requests, R rows."""

    given: StepRows
    logits: Tensor
    """[R, V] raw, as the model has them."""
    drafts: Indices
    """[R - N] all candidates."""
    starts: Indices
    """[N] first row of each request."""
    owners: Indices
    """[R] index of each row's request."""
    depths: Indices
    """[R] candidates before the row."""
    behind: Tensor = torch.empty(0)
    """[R] the candidate behind each row, or NO_DRAFT: where torch decides."""

    @property
    def positions(self) -> Indices:
        """[R] index of the token that the row decides."""
        return self.given.lengths[self.owners] + self.depths

    def to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(array.copy()), self.logits.device)

    def rows_of(self, names: Any, requests: Indices, depths: Indices) -> Indices:
        """The rows of requests that are given by their index in `names`."""
        index = dict(zip(self.given.names, range(len(self.given.names)), strict=True))
        found: Indices = np.fromiter(map(index.__getitem__, names), np.int64, len(names))
        return self.starts[found[requests]] + depths


class StepSampler:
    """Owned by one worker. Per step: `begin`, `decide` when the logits are there, then `fetch`."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._table = SessionTable(vocabulary, device)
        self._proposals: StepProposals | None = None
        self._chains: Mapping[str, Sequence[int]] = {}

    def warm_up(self, dtype: torch.dtype) -> None:
        """Before the first step, which would wait for it: compiles what decides logits of this type on a GPU."""
        counts = self._table.adjustments.counts
        if fused.fuses(counts):
            fused.warm_up(counts.shape[1], dtype, counts.device)

    def begin(
        self,
        new: Iterable[tuple[str, SessionParameters, Sequence[int]]],
        finished: Iterable[str],
        chains: Mapping[str, Sequence[int]],
        proposals: StepProposals | None = None,
    ) -> None:
        """Learns the requests that a step adds, with all their tokens, and removes, and each one's candidates."""
        for name in finished:
            self._table.remove(name)
        for name, parameters, tokens in new:
            self._table.remove(name)  # a step that failed may have added it
            self._table.add(name, parameters, tokens)
        self._chains, self._proposals = chains, proposals

    def decide(self, logits: Tensor, given: StepRows, masks: StepMasks | None) -> tuple[Batch, fused.Decided]:
        """logits [R, V]. Every request that decides gets a token, also where its numbers are broken. Waits for
        nothing."""
        starts, owners = first_rows(given.counts), np.repeat(np.arange(len(given.counts)), given.counts + 1)
        chains = chain.from_iterable(map(self._chains.get, given.names, repeat(())))
        drafts: Indices = np.fromiter(chains, np.int64, int(given.counts.sum()))
        batch = Batch(given, logits, drafts, starts, owners, np.arange(len(owners)) - starts[owners])
        sessions = self._table.sessions(given.names, len(given.names))
        rows = sessions[owners]
        is_fused = fused.fuses(logits) and not rows["ratio"].any() and not _cut_by(UNFUSED, rows)
        decided = (self._decide_fused if is_fused else self._decide)(batch, rows, masks)
        adjusted = np.flatnonzero((sessions["adjustment"] != NONE) & given.decided)
        if len(adjusted):
            places = batch.to_device(sessions["adjustment"][adjusted])
            self._table.adjustments.count(places, decided.tokens[batch.to_device(adjusted)])
        return batch, decided

    def fetch(self, batch: Batch, decided: fused.Decided, drafts: Tensor | None = None, depth: int = 0) -> SampledStep:
        """Fetches the decisions, and of `drafts` int32 [2, N, D] the first `depth`, by one copy, and one more where
        log-probabilities are wanted. Waits for the device."""
        packed, size = decided.packed, len(decided.packed)
        if drafts is not None:
            packed = torch.cat([packed, drafts[:, :, :depth].flatten()])
        fetched = packed.cpu()
        host = fused.Decided(fetched[:size], decided.size)
        tokens = host.tokens.numpy()
        emitted = map(list, map(islice, tokens.tolist(), host.counts[0].tolist()))
        names = batch.given.names
        broken, dishonest = (list(compress(names, flags)) for flags in host.flags.tolist())
        tops = self._table.sessions(names, len(names))["top_logprobs"]
        wanting = (tops != NONE) & batch.given.decided
        likely = self._logprobs(batch, wanting, tops, tokens) if wanting.any() else None
        found = None
        if drafts is not None:
            ids, bits = fetched[size:].view(2, len(names), depth).numpy()
            found = Drafts(names, ids, bits.view(np.float32))
        return SampledStep(dict(zip(names, emitted, strict=True)), broken, dishonest, likely, found)

    def _decide_fused(self, batch: Batch, rows: npt.NDArray[np.void], masks: StepMasks | None) -> fused.Decided:
        """On a GPU, where no session is under a ratio rule."""
        settings = np.zeros(len(rows), fused.SETTINGS)
        for name in ("greedy", "temperature", "repetition", "presence", "frequency"):
            settings[name] = rows[name]
        for name in CUTS.fields or ():
            if name not in UNFUSED:
                settings[name] = rows["cuts"][name]
        settings["key"] = noise.keys(rows["seed"], batch.positions, Purpose.COUPLED)
        settings["place"], settings["mask"] = rows["adjustment"], NONE
        settings["first"], settings["depth"] = (batch.starts - np.arange(len(batch.starts)))[batch.owners], batch.depths
        if masks is not None:
            settings["mask"][batch.rows_of(masks.names, masks.requests, masks.depths)] = np.arange(len(masks.bits))
        requests = np.stack([batch.starts, batch.given.counts, batch.given.decided], axis=1)
        bits = None if masks is None else masks.bits
        table = self._table.adjustments.fused() if (rows["adjustment"] != NONE).any() else None
        return fused.decide(batch.logits, settings, requests, batch.drafts, bits, table)

    def _decide(self, batch: Batch, rows: npt.NDArray[np.void], masks: StepMasks | None) -> fused.Decided:
        counts = batch.given.counts
        on_host = np.full(len(rows), NO_DRAFT)
        on_host[batch.depths < counts[batch.owners]] = batch.drafts
        batch = batch._replace(logits=batch.logits.float(), behind=batch.to_device(on_host))
        processed = self._process(batch, rows, masks)
        # Rows under a ratio rule take part as greedy ones: that finds the broken among them, and the argmax.
        chosen, _ = choose(processed, rows["greedy"] | rows["ratio"], rows["seed"], batch.positions)
        accepted, dishonest = chosen == batch.behind, torch.zeros(len(counts), dtype=torch.bool, device=chosen.device)
        if rows["ratio"].any():
            dishonest = self._reject(batch, rows, processed, chosen, accepted)
        return self._emit(batch, chosen, accepted, dishonest)

    def _process(self, batch: Batch, rows: npt.NDArray[np.void], masks: StepMasks | None) -> Tensor:
        """Returns the rows as `logits_processor.process` changes them."""
        processed = batch.logits
        if masks is not None:
            processed = forbid(processed, batch.rows_of(masks.names, masks.requests, masks.depths), masks.bits)
        adjusted = np.flatnonzero(rows["adjustment"] != NONE)
        if len(adjusted):
            processed = self._adjust(batch, processed, adjusted, rows[adjusted])
        return sharpen(processed, rows["temperature"].copy(), rows["cuts"])

    def _adjust(self, batch: Batch, processed: Tensor, index: Indices, rows: npt.NDArray[np.void]) -> Tensor:
        """Penalties and bias of these rows, as `logits_processor.process` computes them row by row."""
        table, places = self._table.adjustments, batch.to_device(rows["adjustment"])
        counts, lengths = table.counts[places], batch.depths[index]
        if lengths.any():  # the candidates before a row count as output
            ends = np.cumsum(lengths)
            path = np.repeat(batch.starts[batch.owners[index]] - (ends - lengths), lengths) + np.arange(ends[-1])
            where = batch.to_device(np.repeat(np.arange(len(index)), lengths))
            counts.index_put_((where, batch.behind[batch.to_device(path)]), counts.new_ones(()), accumulate=True)
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
        """Writes into `chosen` and `accepted` what the ratio rule decides, and returns where q is dishonest [N]."""
        ratio = np.flatnonzero(rows["ratio"])
        at, sessions = batch.to_device(ratio), np.unique(batch.owners[ratio])
        likeliest, one_hot = chosen[at], batch.to_device(np.flatnonzero(rows["greedy"][ratio]))
        p = processed[at].double().softmax(dim=-1)
        p[one_hot] = 0.0
        p[one_hot, likeliest[one_hot].clamp(min=0)] = 1.0
        p.masked_fill_((likeliest < 0)[:, None], torch.nan)
        chains = Chains(batch.given.counts[sessions], batch.behind[at], rows["seed"][ratio], batch.positions[ratio])
        judged = reject(p, chains, self._drawn(batch, ratio))
        stops = batch.to_device(batch.starts[sessions]) + leading(judged.accepted, chains.counts)
        accepted[at] = judged.accepted
        chosen[at] = torch.where(judged.accepted, chains.drafts, likeliest)
        broken = chosen[stops] < 0
        chosen[stops] = judged.next_tokens.masked_fill(broken, -1)
        dishonest = torch.zeros(len(batch.starts), dtype=torch.bool, device=p.device)
        dishonest[batch.to_device(sessions)] = judged.dishonest & ~broken
        return dishonest

    def _drawn(self, batch: Batch, ratio: Indices) -> Drawn:
        """The proposals, by the index of their row in `ratio`."""
        if (given := self._proposals) is None:
            return Drawn(*np.zeros((3, 0), np.int64))
        rows = np.searchsorted(ratio, batch.rows_of(given.names, given.requests, given.depths))
        return Drawn(rows, given.token_ids, given.weights)

    def _emit(self, batch: Batch, chosen: Tensor, accepted: Tensor, dishonest: Tensor) -> fused.Decided:
        """Each request's choices up to the first that was not accepted; what stands behind them is PADDING."""
        counts = batch.given.counts
        columns = np.arange(int(counts.max()) + 1)
        choices = chosen[batch.to_device(batch.starts[:, None] + np.minimum(columns, counts[:, None]))]
        decided = batch.to_device(batch.given.decided)
        emitted = (batch.to_device(columns) <= leading(accepted, counts)[:, None]) & decided[:, None]
        broken = (emitted & (choices < 0)).any(dim=-1)
        kept = emitted.sum(dim=-1)
        rest = batch.to_device((counts + 1) * batch.given.decided) - kept
        tokens = torch.where(emitted, choices.clamp(min=0), fused.PADDING)
        parts = (tokens.flatten(), kept, rest, broken, dishonest)
        return fused.Decided(torch.cat([part.to(torch.int32) for part in parts]), len(counts))

    def _logprobs(
        self, batch: Batch, wanting: npt.NDArray[np.bool_], tops: Indices, tokens: npt.NDArray[np.int32]
    ) -> StepLogprobs:
        """Log-probabilities of the decided tokens alone, which are fetched already."""
        emitted = np.where(wanting[:, None], tokens, fused.PADDING)
        requests, depths = np.nonzero(emitted != fused.PADDING)
        logits = batch.logits[batch.to_device(batch.starts[requests] + depths)]
        decided = batch.to_device(emitted[requests, depths].astype(np.int64))
        lengths = np.bincount(requests, minlength=len(wanting))[wanting]
        return StepLogprobs(
            list(compress(batch.given.names, wanting)), lengths, logprobs(logits, decided, tops[requests])
        )


def _cut_by(names: Sequence[str], rows: npt.NDArray[np.void]) -> bool:
    """Whether one of these cuts keeps less than all of any row."""
    return any((rows["cuts"][name] != NO_CUTS[name]).any() for name in names)
